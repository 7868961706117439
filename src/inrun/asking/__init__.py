"""Questions that come after training: which examples taught the model this?"""

"""What tests look at inside a run because no public name shows it: here, and nowhere else."""


def are_joined(run):
    """Whether one validation pass serves all targets, and was found to give what theirs give."""
    return run._validator._joining.verified and run._validator._joint is not None


def fell_back(run):
    """Whether compiled code was given up and runs eagerly where it is scored."""
    return bool(run._capture.backend.eager_only)

shell();
answers();

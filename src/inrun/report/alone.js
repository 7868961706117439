byId("h-answers").className = "skip"; // the title of the page says it
shell();
answers();

// Runs before anything is drawn: the theme that was chosen last, else the system's.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;

// Runs before the first paint: applies the theme chosen last, else the system's.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;

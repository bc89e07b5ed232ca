// Dark or light before anything is painted; in a file of its own, since the page may hold no script.
const kept = localStorage.getItem("chatkv-theme");
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;

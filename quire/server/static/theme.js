// Applied before the first paint, so this one script is not a module.
(() => {
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("quire-theme") || "auto";
  } catch {
    // a browser that keeps nothing: follow the system
  }
  document.documentElement.dataset.theme = chosen;
})();

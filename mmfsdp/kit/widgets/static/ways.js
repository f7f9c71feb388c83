// Says which way a person has pressed in the picture of all ways, by mouse, Enter or space.
export default {
  render({ model, el }) {
    const draw = () => {
      const focused = el.contains(document.activeElement) && document.activeElement.dataset.way;
      el.innerHTML = model.get("html");
      if (focused) el.querySelector(`[data-way="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    };
    const choose = event => {
      const way = event.target.closest?.("[data-way]");
      if (!way) return;
      event.preventDefault();
      model.set("pressed", { way: way.dataset.way, at: Date.now() });
      try { model.save_changes(); } catch { /* the kernel has restarted */ }
    };
    const key = event => { if (event.key === "Enter" || event.key === " ") choose(event); };
    el.dataset.lmSuppressShortcuts = "true";
    el.addEventListener("click", choose);
    el.addEventListener("keydown", key);
    model.on("change:html", draw);
    draw();
    return () => { model.off("change:html", draw); };
  },
};

// Names the inputs of ipywidgets for screen readers where they only have a title, and the handles of sliders.
export default {
  render({ el }) {
    let root = null, closed = false, due = 0;
    const label = () => {
      for (const input of root.querySelectorAll("input, select, textarea")) {
        const words = input.title || input.placeholder;
        const labelled = input.labels && [...input.labels].some(one => one.textContent.trim().length > 1);
        if (words && !labelled && !input.getAttribute("aria-label")) input.setAttribute("aria-label", words);
      }
      for (const handle of root.querySelectorAll(".noUi-handle:not([aria-label])")) {
        const words = handle.closest(".widget-inline-hbox")?.querySelector(".widget-label")?.textContent;
        if (words) handle.setAttribute("aria-label", words);
      }
    };
    const changed = new MutationObserver(() => { due = due || requestAnimationFrame(() => { due = 0; label(); }); });
    const start = () => {
      if (closed) return;
      root = el.closest(".mm-widget");
      if (!root) return requestAnimationFrame(start); // it is not in the page yet
      changed.observe(root, { childList: true, subtree: true });
      label();
    };
    start();
    return () => { closed = true; changed.disconnect(); };
  },
};

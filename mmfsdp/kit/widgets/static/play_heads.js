// Gives each step that is drawn in a widget its play head, and one that is drawn once more the place that it had.
export default {
  render({ el }) {
    let root = null, closed = false;
    const kept = new WeakMap(); // by what the pictures stand in, which stays
    const bind = () => {
      for (const plan of root.querySelectorAll(".mm-plan")) {
        const place = plan.parentElement;
        if (!kept.has(place)) kept.set(place, {});
        mmPlayHead(plan, kept.get(place));
      }
    };
    // Before the page is painted, so nothing flickers.
    const drawn = new MutationObserver(bind);
    const start = () => {
      if (closed) return;
      root = el.closest(".mm-widget");
      if (!root) return requestAnimationFrame(start); // it is not in the page yet
      drawn.observe(root, { childList: true, subtree: true });
      bind();
    };
    start();
    return () => { closed = true; drawn.disconnect(); };
  },
};

// Lets go of the newest line of a log when a person scrolls up, and takes hold of it again at the end.
export default {
  render({ model, el }) {
    let box = null, input = null, closed = false;
    // The box is laid out from its bottom: there scrollTop is 0, and above it is negative.
    const scrolled = () => {
      const atEnd = box.scrollTop > -8;
      if (atEnd === model.get("follow")) return;
      model.set("follow", atEnd);
      try { model.save_changes(); } catch { /* the kernel has restarted */ }
    };
    const follow = () => { if (box && model.get("follow")) box.scrollTop = 0; };
    // The checkbox itself is listened to: a busy page's widget may get no messages (see charts.py).
    const pressed = () => { model.set("follow", input.checked); follow(); };
    const start = () => {
      if (closed) return;
      box = el.closest(".mm-logs")?.querySelector(".mm-log-box");
      if (!box) return requestAnimationFrame(start); // it is not in the page yet
      box.tabIndex = 0;
      box.setAttribute("role", "log");
      box.setAttribute("aria-label", "log of the run");
      box.addEventListener("scroll", scrolled);
      input = el.closest(".mm-logs").querySelector("input[type=checkbox]");
      input?.addEventListener("change", pressed);
    };
    start();
    model.on("change:follow", follow);
    return () => {
      closed = true;
      if (box) box.removeEventListener("scroll", scrolled);
      input?.removeEventListener("change", pressed);
      model.off("change:follow", follow);
    };
  },
};

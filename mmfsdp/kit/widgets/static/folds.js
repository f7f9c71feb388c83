// Keeps open what a person has unfolded, and folded what they have folded, when it is drawn once more.
//
// Drawing puts new elements in the place of the old ones. The trait `folds` has what a person did last by name: the
// attribute data-fold of <details> or of a check box, else the words of the summary. It outlives a reload of the page.
const MOST = 200;
export default {
  render({ model, el }) {
    let root = null, closed = false;
    const isOwn = element => element.closest(".mm-widget") === root; // a widget inside has a keeper of its own
    const nameOf = element => element.dataset.fold || element.querySelector(":scope > summary")?.textContent || "";
    const keep = (element, open) => {
      const { [nameOf(element)]: before, ...others } = model.get("folds");
      model.set("folds", Object.fromEntries([...Object.entries(others), [nameOf(element), open]].slice(-MOST)));
      try { model.save_changes(); } catch { /* the kernel has restarted */ }
    };
    const pressed = event => { // not the event "toggle": what is drawn open has one, too
      const details = event.target.closest?.("summary")?.parentElement;
      if (details?.localName === "details" && isOwn(details)) keep(details, !details.open);
    };
    const changed = event => {
      if (event.target.dataset.fold && isOwn(event.target)) keep(event.target, event.target.checked);
    };
    const restore = part => {
      const folds = model.get("folds");
      for (const details of part.querySelectorAll("details")) {
        const open = folds[nameOf(details)];
        if (open !== undefined && isOwn(details)) details.open = open;
      }
      const done = new Set(); // of check boxes of one name, any of which opens all of it, the first is checked
      for (const box of part.querySelectorAll("input[data-fold]")) {
        if (folds[nameOf(box)] && !done.has(nameOf(box)) && isOwn(box)) box.checked = true;
        done.add(nameOf(box));
      }
    };
    // Before the page is painted, so nothing flickers.
    const drawn = new MutationObserver(records => new Set(records.map(record => record.target)).forEach(restore));
    const start = () => {
      if (closed) return;
      root = el.closest(".mm-widget");
      if (!root) return requestAnimationFrame(start); // it is not in the page yet
      root.addEventListener("click", pressed, true);
      root.addEventListener("change", changed);
      drawn.observe(root, { childList: true, subtree: true });
      restore(root);
    };
    start();
    return () => {
      closed = true;
      drawn.disconnect();
      root?.removeEventListener("click", pressed, true);
      root?.removeEventListener("change", changed);
    };
  },
};

// The sliders of watched pictures: moves the captions of a strip through the evaluations, by mouse and keyboard.
//
// Without it the slider is hidden, and the newest captions stand. What a person has chosen outlives a new drawing.
const mmLearning = (root, isOwn = () => true) => {
  const chosen = new Map(); // name of a strip -> its time; none for the newest
  let focused = null;
  const timesOf = strip => JSON.parse(strip.dataset.times);
  const sliderOf = strip => strip.querySelector("input[type=range]");
  const stripOf = event => {
    const strip = event.target.closest?.(".mm-learning");
    return strip && event.target === sliderOf(strip) && isOwn(strip) ? strip : null;
  };
  const show = (strip, at) => {
    const time = timesOf(strip)[at];
    sliderOf(strip).value = at;
    sliderOf(strip).setAttribute("aria-valuetext", time);
    strip.querySelector("[data-time]").textContent = time;
    for (const words of strip.querySelectorAll("[data-said]")) words.textContent = JSON.parse(words.dataset.said)[at];
  };
  const restore = () => {
    for (const strip of root.querySelectorAll(".mm-learning")) {
      if (!isOwn(strip)) continue;
      const times = timesOf(strip), slider = sliderOf(strip), name = strip.dataset.learning;
      slider.hidden = times.length < 2;
      const at = times.indexOf(chosen.get(name));
      if (at >= 0 && Number(slider.value) !== at) show(strip, at);
      if (focused && focused.name === name && !focused.slider.isConnected && document.activeElement === document.body)
        slider.focus({ preventScroll: true });
    }
  };
  const moved = event => {
    const strip = stripOf(event);
    if (!strip) return;
    const times = timesOf(strip), at = Number(event.target.value);
    if (at < times.length - 1) chosen.set(strip.dataset.learning, times[at]);
    else chosen.delete(strip.dataset.learning); // follow the run
    show(strip, at);
  };
  const entered = event => {
    const strip = stripOf(event);
    focused = strip && { name: strip.dataset.learning, slider: event.target };
  };
  const left = event => { if (event.relatedTarget) focused = null; };
  const pressed = event => { if (event.target !== focused?.slider) focused = null; };
  const events = { input: moved, focusin: entered, focusout: left };
  for (const [name, call] of Object.entries(events)) root.addEventListener(name, call);
  document.addEventListener("pointerdown", pressed, true);
  restore();
  return {
    restore,
    close() {
      for (const [name, call] of Object.entries(events)) root.removeEventListener(name, call);
      document.removeEventListener("pointerdown", pressed, true);
    },
  };
};

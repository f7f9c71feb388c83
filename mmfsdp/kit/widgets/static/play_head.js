// Moves the play head of a step by mouse, keyboard and a button.
//
// All that is ever shown is drawn already, with the stops at which it is (data-at). `kept` is what the pictures that
// stood here before have left: where the head was, and whether it played.
const mmPlayHead = (plan, kept = {}) => {
  const input = plan.querySelector("input.mm-head");
  if (!input?.hidden) return; // no step is drawn, or its head moves already
  const line = plan.querySelector(".mm-head-line"), svg = line.closest("svg");
  const track = svg.querySelector(".mm-head-track");
  const now = plan.querySelector(".mm-now > span"), play = plan.querySelector(".mm-play");
  const lines = name => input.dataset[name].split("\n");
  const names = lines("names"), words = lines("words"), stops = input.dataset.stops.split(";");
  const spans = text => text.split(" ").map(span => span.split("-").map(Number));
  const shapes = [...plan.querySelectorAll("[data-at]")].map(shape => [shape, spans(shape.dataset.at)]);
  let timer = 0;

  const fill = (template, ...texts) => template.replaceAll("{}", () => texts.shift());
  const sentence = stop => {
    const done = [];
    for (const [, letter, indices] of stops[stop].matchAll(/([a-z])([\d,]*)/gi)) {
      const named = indices.split(",").map(index => names[index]).join(", ");
      if (letter === "m") return fill(input.dataset.frame, done.join(", "), named);
      const [withNames, same] = words.find(line => line[0] === letter).slice(1).split("|");
      done.push(indices ? fill(withNames, named) : same);
    }
  };
  const show = stop => {
    const text = sentence(stop);
    input.value = stop;
    input.setAttribute("aria-valuetext", text);
    now.textContent = text;
    const { x: { baseVal: x }, width: { baseVal: width } } = track;
    line.setAttribute("transform", `translate(${x.value + (stop + 0.5) * width.value / stops.length} 0)`);
    for (const [shape, at] of shapes) {
      const seen = at.some(([first, last = first]) => first <= stop && stop <= last);
      shape.setAttribute("visibility", seen ? "visible" : "hidden");
    }
  };
  const move = stop => {
    plan.classList.add("mm-moved");
    Object.assign(kept, { stop, length: stops.length });
    show(stop);
  };
  const pause = () => {
    clearInterval(timer);
    timer = 0;
    kept.playing = false;
    play.textContent = "Play";
  };
  const start = () => {
    kept.playing = true;
    play.textContent = "Pause";
    timer = setInterval(() => {
      if (!plan.isConnected) return clearInterval(timer); // drawn once more
      const next = Number(input.value) + 1;
      next < stops.length ? move(next) : pause();
    }, Math.max(60, Math.min(600, 20000 / stops.length)));
  };
  input.addEventListener("input", () => { pause(); move(Number(input.value)); });
  play.addEventListener("click", () => {
    if (timer) return pause();
    if (Number(input.value) === stops.length - 1) move(0);
    start();
  });

  const follow = event => {
    const box = track.getBoundingClientRect(); // whatever scales it
    const stop = Math.floor((event.clientX - box.left) / box.width * stops.length);
    move(Math.max(0, Math.min(stops.length - 1, stop)));
  };
  svg.addEventListener("pointerdown", event => {
    if (event.button) return;
    pause();
    svg.setPointerCapture(event.pointerId);
    plan.classList.add("mm-dragged"); // the head is what is spoken of, not the unit beneath the mouse
    follow(event);
    input.focus({ preventScroll: true });
    event.preventDefault();
  });
  svg.addEventListener("pointermove", event => { if (svg.hasPointerCapture(event.pointerId)) follow(event); });
  svg.addEventListener("pointerleave", () => plan.classList.remove("mm-dragged"));

  input.hidden = play.hidden = false;
  if (kept.length !== stops.length) pause();
  kept.length === stops.length ? move(kept.stop) : show(Number(input.value));
  if (kept.playing) start();
};

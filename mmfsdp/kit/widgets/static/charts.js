// Draws the metrics of runs with uPlot: one crosshair over all charts, zoom, log scale, smoothing, PNG and CSV.
//
// mmCharts(root, spec, source) fills the element `root`.
//   spec: {total, predicted: {key: value}, colors, compact}; the page's choices are kept in spec.state if it is there
//   source.ask(request): asks for points; the answer comes by the returned object's `take(reply)`
//   source.heard(): says that the first answer has come; may be missing
//   reply: {charts: [...], tables: [{name, epoch, bucket, first, end, rows, at, step, time, values, breaks}], ended}
// The element's property `mmCharts` lets tests read what is drawn.
function mmCharts(root, spec, source) {
  const POLL_MS = 1000, HIDDEN_MS = 10000, SILENT_MS = 15000, FONT = "12px system-ui, sans-serif";
  const state = { x: "step", log: false, smooth: 0, zoom: null };
  const tables = new Map(); // by the run's name
  let charts = [], plots = [], cursorX = null, ended = false, asked = 0, request = "", requests = 0, timer = 0, closed = false, heard = false;
  const syncKey = "mm" + Math.random().toString(36).slice(2);

  // Elements ---------------------------------------------------------------------------------------------------------

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      name in element && name !== "style" && name !== "list" ? (element[name] = value) : element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const tool = (label, input, title) => make("label", { title }, label + " ", input);
  const xInput = make("select", {}, make("option", { value: "step" }, "step"), make("option", { value: "time" }, "time"));
  const logInput = make("input", { type: "checkbox" });
  const smoothInput = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
  const reset = make("button", { type: "button", disabled: true }, "Whole run");
  const png = make("button", { type: "button", title: "Save the charts as a picture" }, "PNG");
  const csv = make("button", { type: "button", title: "Save the points that are drawn; zoom in for every step" }, "CSV");
  const bar = make("div", { className: "mm-chart-tools" },
    tool("x", xInput, "Draw over the optimizer steps, or over the time since the first one"),
    tool("log", logInput, "Logarithmic axis for loss, gradient norm and learning rate"),
    tool("smooth", smoothInput, "Average over earlier points; the line itself stays, paler"),
    reset, png, csv);
  const grid = make("div", { className: "mm-chart-grid" });
  const empty = make("div", { className: "mm-quiet" }, "No steps yet.");
  const runs = make("div", { className: "mm-chart-read" });
  const breaks = make("div", { className: "mm-chart-breaks", role: "status" });
  const spoken = make("div", { className: "mm-spoken", ariaLive: "polite" });
  const shut = make("button", { type: "button", title: "Back to all charts" }, "×");
  const large = make("dialog", { className: "mm-chart-large", ariaLabel: "one chart, large" }, shut); // in front of the whole page
  root.classList.add("mm-live-charts");
  root.append(bar, runs, empty, grid, breaks, spoken, large);
  if (spec.compact) root.classList.add("mm-compact-charts");
  bar.hidden = true;

  xInput.onchange = () => { state.x = xInput.value; zoom(null); };
  logInput.onchange = () => { state.log = logInput.checked; rebuild(); };
  smoothInput.oninput = () => { state.smooth = Number(smoothInput.value); redraw(); };
  reset.onclick = () => zoom(null);
  png.onclick = savePng;
  shut.onclick = () => large.close();
  large.onclick = event => event.target === large && large.close(); // a click beside it
  large.onkeydown = event => event.stopPropagation(); // a notebook has keys of its own
  large.onclose = () => {
    const plot = plots.find(isLarge);
    if (!plot || large.open) return; // charts made anew are in front again
    grid.insertBefore(plot.box, grid.children[plots.indexOf(plot)] || null);
    fit(plot);
    plot.box.focus();
  };
  csv.onclick = () => save(new Blob([csvText()], { type: "text/csv" }), "charts.csv");

  // Numbers ----------------------------------------------------------------------------------------------------------

  const short = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    for (const [limit, divisor, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
      if (size >= limit) return +(value / divisor).toPrecision(3) + letter;
    if (size >= 1 || value === 0) return String(+value.toPrecision(4));
    return size < 1e-3 ? value.toExponential(1).replace("e-0", "e-") : String(+value.toPrecision(3));
  };
  const bytes = value => {
    if (value === 0) return "0";
    for (const [divisor, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"]])
      if (Math.abs(value) >= divisor) return +(value / divisor).toPrecision(4) + " " + unit;
    return +(value / 1024).toPrecision(3) + " KiB";
  };
  const clock = seconds => {
    const whole = Math.round(seconds), pad = n => String(n).padStart(2, "0");
    return whole < 60 ? +seconds.toPrecision(3) + " s" : `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
  };
  const shown = (value, unit) => {
    if (value == null) return "–";
    if (unit === "bytes") return bytes(value);
    if (unit === "share") return +(100 * value).toPrecision(3) + " %";
    return short(value) + (unit ? " " + unit : "");
  };
  const place = value => (state.x === "time" ? clock(value) : "step " + Math.round(value));
  const ink = () => getComputedStyle(root).color;
  const faint = color => { // the same color at a fifth of its strength
    const [r, g, b] = color.match(/[\d.]+/g) || [120, 120, 120]; // an element outside the page has no color
    return `rgba(${r},${g},${b},0.2)`;
  };

  // Lines: one for each metric of a chart and each run -----------------------------------------------------------------

  const linesOf = chart => {
    const lines = [], many = tables.size > 1;
    [...tables].forEach(([name, table], run) => chart.lines.forEach((line, index) => {
      if (!(line.key in table.values)) return;
      const color = spec.colors[many ? run % spec.colors.length : line.right ? 1 : 0];
      const label = many ? (chart.lines.length > 1 ? `${name}: ${line.label}` : name) : line.label;
      lines.push({ ...line, run: name, color, label, dashed: line.dashed || (index > 0 && !line.right) });
    }));
    return lines;
  };
  const isGap = value => value === "nan";
  const smoothed = values => {
    let mean = 0, weight = 0;
    return values.map(value => {
      if (value == null) return value;
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + 1 - state.smooth;
      return mean / weight;
    });
  };
  // uPlot's data: x, and for each line its values and its smoothed ones. undefined is bridged, null is a gap.
  const dataOf = chart => {
    const logY = state.log && chart.log;
    const parts = [...tables.values()].map(table => {
      const lines = linesOf(chart).filter(line => tables.get(line.run) === table);
      const columns = lines.map(line => table.values[line.key].map(value =>
        isGap(value) ? null : value == null || (logY && value <= 0) ? undefined : value));
      return [table[state.x], ...columns.flatMap(values => [values, state.smooth ? smoothed(values) : values.map(() => undefined)])];
    });
    if (parts.length < 2) return parts[0];
    return uPlot.join(parts);
  };
  const xRange = () => {
    if (state.zoom) return state.zoom;
    let low = Infinity, high = -Infinity;
    for (const table of tables.values()) {
      const xs = table[state.x];
      if (xs.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]); }
    }
    if (low > high) return [0, 1];
    if (state.x === "step" && spec.total) high = Math.max(high, Math.min(spec.total, Math.max(10, 2 * high)));
    return high > low ? [Math.min(low, 0), high] : [low - 1, high + 1];
  };
  const yRange = (chart, right) => (u, low, high) => {
    const predicted = right ? [] : chart.lines.map(line => (spec.predicted || {})[line.key]).filter(value => value > 0);
    if (low == null || high == null) { low = 0; high = predicted.length ? 0 : 1; }
    low = Math.min(low, ...predicted); high = Math.max(high, ...predicted);
    if (state.log && chart.log && !right) return low > 0 ? [low / 1.2, high * 1.2] : [1e-3, 1];
    const fromZero = chart.from_zero || right;
    if (fromZero) low = Math.min(0, low);
    const margin = high - low || Math.abs(high) || 1;
    const below = low - 0.05 * margin;
    return [low >= 0 && (fromZero || below < 0) ? 0 : below, high + 0.08 * margin];
  };

  // Plots ------------------------------------------------------------------------------------------------------------

  const isLarge = plot => plot.box.parentElement === large;
  const fit = plot => {
    const { clientWidth, clientHeight } = large;
    plot.u.setSize(isLarge(plot) ? { width: clientWidth - 24, height: clientHeight - 60 } : { width: width(), height: height() });
  };
  const enlarge = plot => {
    if (large.open) return;
    large.append(plot.box);
    large.showModal();
    fit(plot);
    plot.box.focus();
  };
  const height = () => spec.height || 130;
  const width = () => {
    const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length, gap = 16;
    return Math.max(180, Math.floor((grid.clientWidth - gap * (columns - 1)) / columns));
  };
  const axis = (chart, right) => {
    const unit = (chart.lines.find(line => line.right === right) || {}).unit || "";
    return {
      scale: right ? "right" : "y", side: right ? 1 : 3, font: FONT, size: unit === "bytes" ? 66 : right ? 48 : 52, gap: 3,
      stroke: ink, grid: { show: !right, stroke: () => faint(ink()), width: 1 }, ticks: { show: false }, space: 26,
      ...(unit === "bytes" ? { incrs: Array.from({ length: 44 }, (_, power) => 2 ** power) } : {}),
      values: (u, all) => all.map(value => value == null ? null : unit === "bytes" ? bytes(value) : unit === "share" ? shown(value, unit) : short(value)),
    };
  };
  const optionsOf = (chart, plot) => {
    const lines = linesOf(chart), rights = lines.some(line => line.right);
    const series = [{}];
    for (const line of lines) {
      const scale = line.right ? "right" : "y", dash = line.dashed ? [5, 3] : undefined, points = { show: false };
      const pale = () => (state.smooth ? line.color + "55" : line.color);
      series.push({ label: line.label, scale, stroke: pale, width: 1.5, dash, points: { show: true, filter: aloneIn, size: 5, stroke: line.color, fill: line.color }, spanGaps: false });
      series.push({ label: line.label, scale, stroke: line.color, width: 1.8, dash, points, spanGaps: false });
    }
    const axes = [
      { font: FONT, size: 24, gap: 3, stroke: ink, grid: { show: false }, ticks: { show: false }, space: 60,
        values: (u, all) => all.map(value => (state.x === "time" ? clock(value) : short(value))) },
      axis(chart, false),
    ];
    const scales = { x: { time: false, range: xRange }, y: { distr: state.log && chart.log ? 3 : 1, range: yRange(chart, false) } };
    if (rights) { axes.push(axis(chart, true)); scales.right = { range: yRange(chart, true) }; }
    return {
      width: width(), height: height(), legend: { show: false }, series, axes, scales, padding: [6, rights ? 0 : 20, 0, 0],
      cursor: {
        sync: { key: syncKey, filters: { pub: type => type === "mousemove" || type === "mouseleave" } }, points: { size: 6 }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => zoom(null) },
      },
      hooks: {
        draw: [u => drawMarks(u, chart)],
        setCursor: [u => { cursorX = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null; readOut(plot, u.cursor.idx); }],
        setSelect: [u => {
          if (u.select.width > 4) zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          if (u.select.width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    };
  };
  // A value between two gaps has no line, so it is drawn as a point.
  const aloneIn = (u, seriesIndex) => {
    const values = u.data[seriesIndex], known = [], alone = [];
    values.forEach((value, i) => { if (value !== undefined) known.push(i); });
    known.forEach((i, at) => {
      if (values[i] !== null && values[known[at - 1]] == null && values[known[at + 1]] == null) alone.push(i);
    });
    return alone;
  };
  // Where the run stopped, and the steps that ran again: {stopped, resumed, words}, of one run.
  const breaksOf = () => (tables.size === 1 ? [...tables.values()][0].breaks || [] : []);
  const drawBreaks = u => {
    if (state.x !== "step") return; // time goes on
    const { ctx, bbox } = u, at = step => u.valToPos(step, "x", true);
    for (const { stopped, resumed } of breaksOf()) {
      ctx.fillStyle = faint(ink()); ctx.strokeStyle = ink(); ctx.lineWidth = 1.4 * devicePixelRatio;
      if (resumed != null) ctx.fillRect(at(resumed), bbox.top, at(stopped) - at(resumed), bbox.height);
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath(); ctx.moveTo(at(stopped), bbox.top); ctx.lineTo(at(stopped), bbox.top + bbox.height); ctx.stroke();
    }
    ctx.setLineDash([]);
  };
  const tellBreaks = () => {
    const words = breaksOf().map(each => each.words);
    if (words.join() !== [...breaks.children].map(line => line.textContent).join())
      breaks.replaceChildren(...words.map(text => make("div", {}, text)));
  };
  // Predicted values as dashed lines, and a cross below each value that was not finite.
  const drawMarks = (u, chart) => {
    const { ctx, bbox } = u, scale = devicePixelRatio;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    drawBreaks(u);
    ctx.font = `${12 * scale}px system-ui, sans-serif`;
    for (const line of chart.lines) {
      const predicted = (spec.predicted || {})[line.key];
      if (!(predicted > 0)) continue;
      const y = u.valToPos(predicted, "y", true);
      ctx.strokeStyle = ctx.fillStyle = ink(); ctx.lineWidth = 1.4 * scale; ctx.setLineDash([6 * scale, 4 * scale]);
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      ctx.textAlign = "right"; ctx.fillText(`predicted ${shown(predicted, line.unit)}`, bbox.left + bbox.width - 4 * scale, y + 14 * scale);
    }
    ctx.setLineDash([]);
    for (const line of linesOf(chart)) {
      const table = tables.get(line.run), size = 3.5 * scale;
      ctx.strokeStyle = "#C62828"; ctx.lineWidth = 1.5 * scale;
      let last = -Infinity;
      table.values[line.key].forEach((value, i) => {
        const x = isGap(value) ? u.valToPos(table[state.x][i], "x", true) : last;
        if (x - last < 2 * size) return;
        last = x;
        const y = bbox.top + bbox.height - 2 * size;
        ctx.beginPath(); ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
        ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size); ctx.stroke();
      });
    }
    ctx.restore();
  };
  const nameRuns = () => {
    runs.replaceChildren();
    if (tables.size > 1)
      [...tables.keys()].forEach((name, i) => {
        runs.append(make("span", {}, make("i", { style: `border-top: 3px solid ${spec.colors[i % spec.colors.length]}` }), name));
      });
  };
  const rebuild = () => {
    nameRuns();
    root.classList.toggle("mm-many-runs", tables.size > 1);
    const seen = plots.find(isLarge)?.chart.title; // it stays in front
    if (seen) large.close();
    for (const plot of plots) { plot.u.destroy(); plot.box.remove(); }
    plots = [];
    bar.hidden = !charts.length; empty.hidden = charts.length > 0;
    for (const chart of charts) {
      const title = make("b", {}, chart.title), read = make("span", { className: "mm-chart-read" });
      const box = make("div", { className: "mm-chart", tabIndex: 0, role: "img" }, make("div", { className: "mm-chart-title" }, title, read));
      grid.append(box);
      plots.push({ chart, box, read, u: null });
    }
    for (const plot of plots) {
      plot.lines = linesOf(plot.chart);
      plot.u = new uPlot(optionsOf(plot.chart, plot), dataOf(plot.chart), plot.box);
      plot.box.onkeydown = event => moveCursor(plot, event);
      plot.box.onpointerdown = event => { plot.pressed = event.clientX; };
      // A drag zooms, and a second click shows the whole run again.
      plot.box.onclick = event => {
        clearTimeout(plot.click);
        if (event.detail < 2 && Math.abs(event.clientX - plot.pressed) <= 4) plot.click = setTimeout(() => enlarge(plot), state.zoom ? 300 : 0);
      };
      readOut(plot, null);
      if (plot.chart.title === seen) enlarge(plot);
    }
  };
  const redraw = () => {
    for (const plot of plots) { plot.u.setData(dataOf(plot.chart)); readOut(plot, plot.u.cursor.idx); }
  };
  const lineValues = (plot, index) => plot.lines.map((line, i) => {
    const values = plot.u.data[1 + 2 * i];
    let at = index == null ? values.length - 1 : index;
    while (at > 0 && values[at] === undefined) at--; // metrics that are not of each step
    return { line, value: values[at], at };
  });
  // Beside the title: the values at the crosshair, else the newest ones. Screen readers get the whole line in words.
  const readOut = (plot, index) => {
    const values = lineValues(plot, index);
    plot.read.replaceChildren(...values.map(({ line, value }) => {
      const words = value === null ? "not finite" : shown(value, line.unit);
      const mark = make("i", { style: `border-top: 3px ${line.dashed ? "dashed" : "solid"} ${line.color}` });
      const named = tables.size === 1 && plot.lines.length > 1; // several runs have their names above the charts
      return make("span", { title: line.label }, mark, named ? `${line.label} ${words}` : words);
    }));
    if (index != null && plot.u.data[0][index] != null)
      plot.read.append(make("span", { className: "mm-quiet" }, place(plot.u.data[0][index])));
    if (index == null) plot.box.setAttribute("aria-label", textOf(plot));
  };
  const textOf = plot => {
    const words = plot.lines.map((line, i) => {
      const all = plot.u.data[1 + 2 * i], values = all.filter(value => value != null), newest = [...all].reverse().find(value => value !== undefined);
      if (!values.length) return `${line.label}: no finite value`;
      let low = values[0], high = values[0];
      for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
      const now = newest == null ? "not finite" : shown(newest, line.unit);
      return `${line.label}: ${shown(values[0], line.unit)} at first, ${now} now, between ${shown(low, line.unit)} and ${shown(high, line.unit)}`;
    });
    return `${plot.chart.title}. ${words.join("; ")}.`;
  };
  const moveCursor = (plot, event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "Escape") return large.open || zoom(null);
    if (event.key === "Enter") { event.preventDefault(); event.stopPropagation(); return enlarge(plot); }
    if (!step && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault(); event.stopPropagation();
    const xs = plot.u.data[0], now = plot.u.cursor.idx;
    let index = now == null ? xs.length - 1 : now + (step || 0);
    if (event.key === "Home") index = 0;
    if (event.key === "End") index = xs.length - 1;
    index = Math.max(0, Math.min(xs.length - 1, index));
    plot.u.setCursor({ left: plot.u.valToPos(xs[index], "x"), top: 10 }, true, true);
    const words = lineValues(plot, index).map(({ line, value }) => `${line.label} ${value == null ? "not finite" : shown(value, line.unit)}`);
    spoken.textContent = `${place(xs[index])}: ${words.join(", ")}`;
  };
  const zoom = range => {
    state.zoom = range && range[1] > range[0] ? range : null;
    reset.disabled = !state.zoom;
    for (const table of tables.values()) table.bucket = 0; // all points anew, as fine as this part allows
    redraw();
    ask(true);
  };

  // Points -----------------------------------------------------------------------------------------------------------

  const ask = (now = false) => {
    if (closed) return;
    clearTimeout(timer);
    timer = setTimeout(ask, document.hidden ? HIDDEN_MS : POLL_MS);
    if (!now && asked && Date.now() - asked < SILENT_MS) return; // the kernel is busy
    asked = Date.now();
    request = `${syncKey} ${++requests}`; // two pages may show the same charts, and both get each answer
    const have = {};
    for (const [name, { epoch, bucket, first, end }] of tables) have[name] = { epoch, bucket, first, end };
    const pixels = Math.round(width() * Math.min(2, devicePixelRatio || 1));
    source.ask({ request, x: state.x, low: state.zoom && state.zoom[0], high: state.zoom && state.zoom[1], pixels, have, heard });
  };
  const take = reply => {
    if (closed || reply.request !== request) return; // an answer to an earlier question
    if (!heard) { heard = true; source.heard?.(); }
    asked = 0;
    let changed = false;
    for (const { name, at, step, time, values, ...facts } of reply.tables) {
      let table = tables.get(name);
      const same = table && ["epoch", "bucket", "first"].every(key => table[key] === facts[key]);
      const told = JSON.stringify(table?.breaks) === JSON.stringify(facts.breaks);
      if (same && told && table.end === facts.end && at === table.step.length) continue;
      if (!same || !table) { table = { step: [], time: [], values: {} }; tables.set(name, table); }
      changed = true;
      Object.assign(table, facts);
      table.step.length = table.time.length = at;
      table.step.push(...step); table.time.push(...time);
      for (const [key, column] of Object.entries(values)) {
        const before = table.values[key] || new Array(at).fill(null);
        before.length = at;
        table.values[key] = before.concat(column);
      }
    }
    const newCharts = JSON.stringify(reply.charts) !== JSON.stringify(charts);
    ended = reply.ended;
    if (newCharts || (changed && plots.some(plot => plot.lines.length !== linesOf(plot.chart).length))) { charts = reply.charts; rebuild(); }
    else if (changed) redraw();
    if (changed) tellBreaks();
    clearTimeout(timer);
    if (reply.more) ask(true);
    else if (!ended) timer = setTimeout(ask, document.hidden ? HIDDEN_MS : POLL_MS);
  };

  // Files ------------------------------------------------------------------------------------------------------------

  function save(blob, name) {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    document.body.append(link); link.click(); link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  function csvText() {
    const keys = [...new Set([...tables.values()].flatMap(table => Object.keys(table.values)))];
    const quote = text => `"${String(text).replaceAll('"', '""').replace(/^[=+@-]/, "'$&")}"`;
    const many = tables.size > 1;
    let text = [...(many ? ["run"] : []), "step", "seconds", ...keys].map(quote).join(",") + "\n";
    for (const [name, table] of tables)
      table.step.forEach((step, i) => {
        const cells = keys.map(key => (table.values[key] || [])[i] ?? "");
        text += [...(many ? [quote(name)] : []), step, table.time[i], ...cells].join(",") + "\n";
      });
    return text;
  }
  function savePng() {
    const scale = devicePixelRatio || 1, box = grid.getBoundingClientRect();
    const canvas = make("canvas", { width: box.width * scale, height: box.height * scale }), ctx = canvas.getContext("2d");
    let behind = root;
    while (behind.parentElement && /^(transparent|rgba\(0, 0, 0, 0\))$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
    const paper = getComputedStyle(behind).backgroundColor;
    ctx.fillStyle = /^(transparent|rgba\(0, 0, 0, 0\))$/.test(paper) ? "#fff" : paper;
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = ink(); ctx.font = `${13 * scale}px system-ui, sans-serif`;
    for (const plot of plots) {
      const at = plot.box.getBoundingClientRect(), drawn = plot.u.ctx.canvas, inner = drawn.getBoundingClientRect();
      ctx.fillText(plot.chart.title + "   " + plot.read.textContent, (at.left - box.left) * scale, (at.top - box.top + 14) * scale);
      ctx.drawImage(drawn, (inner.left - box.left) * scale, (inner.top - box.top) * scale, inner.width * scale, inner.height * scale);
    }
    canvas.toBlob(blob => save(blob, "charts.png"));
  }

  // Life -------------------------------------------------------------------------------------------------------------

  let lastWidth = 0;
  const resized = new ResizeObserver(() => {
    plots.filter(isLarge).forEach(fit);
    if (!plots.length || Math.abs(width() - lastWidth) < 2) return;
    lastWidth = width();
    plots.forEach(fit);
  });
  resized.observe(root); resized.observe(large);
  const themed = new MutationObserver(() => plots.forEach(plot => plot.u.redraw(false)));
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
  const dark = matchMedia("(prefers-color-scheme: dark)"), onDark = () => plots.forEach(plot => plot.u.redraw(false));
  dark.addEventListener("change", onDark);
  const onVisible = () => { if (!document.hidden && !ended) ask(true); };
  document.addEventListener("visibilitychange", onVisible);

  const api = {
    take,
    change(values) { Object.assign(spec, values); if (plots.length) redraw(); ask(true); },
    close() {
      closed = true;
      clearTimeout(timer); resized.disconnect(); themed.disconnect();
      dark.removeEventListener("change", onDark); document.removeEventListener("visibilitychange", onVisible);
      for (const plot of plots) plot.u.destroy();
      root.replaceChildren();
    },
    csvText,
    // What is drawn, for tests.
    read() {
      const drawn = {};
      for (const plot of plots) {
        const lines = {};
        plot.lines.forEach((line, i) => { lines[line.label] = [...plot.u.data[1 + 2 * i]]; });
        const { min, max } = plot.u.scales.y, index = plot.u.cursor.idx;
        const cursor = index == null ? null : { x: plot.u.data[0][index], left: plot.u.cursor.left };
        drawn[plot.chart.title] = { isLarge: isLarge(plot), x: [...plot.u.data[0]], lines, y: [min, max], xs: [plot.u.scales.x.min, plot.u.scales.x.max], distr: plot.u.scales.y.distr, cursor, text: textOf(plot), read: plot.read.textContent };
      }
      return { charts: drawn, tables: Object.fromEntries([...tables].map(([name, { bucket, first, end, rows, epoch }]) => [name, { bucket, first, end, rows, epoch }])), state: { ...state }, ended };
    },
  };
  root.mmCharts = api;
  ask(true);
  return api;
}

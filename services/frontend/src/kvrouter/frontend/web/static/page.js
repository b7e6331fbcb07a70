// The page: reads the state every two seconds and draws it. All text goes through textContent, never into markup.

import { drawLine } from "./charts.js";

const INTERVAL_MS = 2000;
const KEY = "kvrouter-key";
const DECISIONS = 40;
const LEAST_SAMPLES = 20;

const byId = (id) => document.getElementById(id);
const state = { paused: false, sort: new Map(), open: new Map(), data: null, timer: 0, marked: "" };

function element(name, { text = "", className = "", ...rest } = {}, ...children) {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Numbers

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(0)} %`);
const number = (value) => (value === null ? "–" : whole.format(value));
const short = (value) => (value === null ? "–" : value < 10000 ? whole.format(value) : compact.format(value));
const term = (value) => (value === null ? "∞" : Number.isInteger(value) ? whole.format(value) : Number(value.toPrecision(4)).toLocaleString("en-US"));

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 3600 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Formats a rate: three digits, two below one, per second. */
const rate = (value) => (value === null ? "–" : `${value < 100 ? Number(value.toPrecision(value < 1 ? 2 : 3)) : short(value)}/s`);

/** Formats a latency in milliseconds, or in seconds from one second on. */
const latency = (seconds) => (seconds === null ? "–" : seconds < 0.01 ? `${(1000 * seconds).toFixed(1)} ms` : seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(2)} s`);

/** Units of the costs of a mode, where it has one. */
const COST_UNITS = { forecast: " ms", kv: " blocks" };
const cost = (value, mode) => (value === null ? "∞" : `${term(value)}${COST_UNITS[mode] ?? ""}`);

const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

// Ids

/** Shows an id whose whole text is in its title, and which a click copies. */
function copied(id) {
  const made = element("button", { text: id, type: "button", className: "id", title: `${id} – click to copy` });
  made.dataset.focus = `id ${id}`;
  made.addEventListener("click", async (event) => {
    event.preventDefault();
    event.stopPropagation();
    byId("copied").textContent = (await copy(id)) ? `copied ${id}` : `not copied: select ${id}`;
  });
  return made;
}

/** Returns whether the text is in the clipboard; browsers give no clipboard to pages without encryption elsewhere. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { "aria-hidden": "true", className: "skip" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

// Tables

/** Columns: {name, value(row), text(row), isText, cell(row)}. A click on a header sorts. */
function table(id, columns, rows, { rowClass = () => "", caption }) {
  const [sorted, down] = state.sort.get(id) ?? [null, false];
  const column = columns.find((each) => each.name === sorted);
  const ordered = column ? [...rows].sort((a, b) => order(column.value(a), column.value(b)) * (down ? -1 : 1)) : rows;
  const head = element("tr");
  for (const each of columns) {
    const button = element("button", { text: each.name + (each.name === sorted ? (down ? " ▾" : " ▴") : ""), type: "button" });
    button.dataset.focus = `${id}/${each.name}`;
    button.addEventListener("click", () => {
      state.sort.set(id, [each.name, each.name === sorted ? !down : !each.isText]);
      draw();
    });
    const sort = each.name === sorted ? (down ? "descending" : "ascending") : "none";
    head.append(element("th", { className: each.isText ? "text" : "", scope: "col", "aria-sort": sort }, button));
  }
  const body = element("tbody");
  for (const row of ordered) {
    const line = element("tr", { className: rowClass(row) });
    for (const each of columns) {
      const cell = element("td", { className: [each.isText ? "text" : "", each.wide ? "wide" : ""].join(" ").trim() });
      if (each.cell) cell.append(...each.cell(row));
      else cell.textContent = each.text ? each.text(row) : each.value(row);
      line.append(cell);
    }
    body.append(line);
  }
  const made = element("table", {}, element("caption", { text: caption, className: "skip" }), element("thead", {}, head), body);
  const scroll = element("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
  scroll.dataset.scroll = id;
  return scroll;
}

function order(a, b) {
  if (a === b) return 0;
  if (a === null) return -1;
  if (b === null) return 1;
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

// Sections

function drawProblems(problems) {
  const items = problems.map((problem) =>
    element(
      "li",
      { className: `${problem.severity}-item` },
      element("strong", { text: problem.severity, className: problem.severity }),
      ` ${problem.what}`,
      element("span", { text: problem.remedy, className: "remedy" }),
    ),
  );
  byId("problems").replaceChildren(...(items.length ? items : [element("li", { text: "None found.", className: "good" })]));
}

function drawFigures(data) {
  const ranks = data.components.flatMap((component) => component.ranks);
  const fields = ["prompt_tokens", "cached_tokens", "predicted_prompt_tokens", "reachable_tokens"];
  const hour = fields.map((field) => data.history.reduce((sum, point) => sum + point[field], 0));
  const blocks = ranks.reduce((sum, rank) => [sum[0] + rank.active_blocks, sum[1] + rank.total_blocks], [0, 0]);
  const figures = [
    [number(new Set(ranks.map((rank) => rank.endpoint)).size), "workers"],
    [number(ranks.length), "ranks"],
    [number(ranks.reduce((sum, rank) => sum + rank.requests, 0)), "requests booked"],
    [number(data.components.reduce((sum, component) => sum + component.queued, 0)), "requests queued"],
    [blocks[1] ? share(blocks[0] / blocks[1]) : "–", "KV blocks in use"],
    [hour[0] ? share(hour[1] / hour[0]) : "–", "hit rate, last hour"],
    [share(bestHeld(hour[0], hour[1], hour[2], hour[3])), "best rank held, last hour"],
    [short(hour[1]), "prompt tokens saved, last hour"],
  ];
  drawTiles("figures", figures);
  byId("summary").textContent = `${figures[0][0]} workers, ${data.problems.length || "no"} problem${data.problems.length === 1 ? "" : "s"}`;
}

/** Share of prompt tokens that the best rank held: at least what was found, of requests without a prediction too. */
function bestHeld(prompt, cached, predictedPrompt, reachable) {
  return predictedPrompt ? Math.max(reachable / predictedPrompt, prompt ? cached / prompt : 0) : null;
}

function drawTiles(id, figures) {
  byId(id).replaceChildren(
    ...figures.map(([value, what]) => element("div", {}, element("b", { text: value }), element("span", { text: what }))),
  );
}

function drawTraffic(traffic) {
  const quantiles = ["p50", "p95", "p99"];
  const shown = (values, samples, each) => (samples > 0 && samples < LEAST_SAMPLES ? "too few" : latency(values?.[each] ?? null));
  byId("traffic-span").textContent = traffic ? `last ${duration(traffic.seconds)}` : "";
  drawTiles("traffic", [
    [rate(traffic?.requests_per_second ?? null), "requests"],
    [rate(traffic?.output_tokens_per_second ?? null), "output tokens"],
    ...quantiles.map((each) => [shown(traffic?.ttft_seconds, traffic?.ttft_samples, each), `time to first token, ${each}`]),
    ...quantiles.map((each) => [shown(traffic?.inter_token_seconds, traffic?.inter_token_samples, each), `between tokens, ${each}`]),
  ]);
  const made = [
    errorTable("HTTP errors", traffic, traffic?.http_errors ?? [], (e) => e.error),
    errorTable("requests that did not succeed, over HTTP or gRPC", traffic, traffic?.errors ?? [], (e) => e.code),
  ].filter(Boolean);
  byId("errors").replaceChildren(...(made.length ? made : [element("p", { text: "No errors since the start.", className: "quiet" })]));
}

function errorTable(name, traffic, errors, value) {
  const columns = [
    { name, isText: true, wide: true, value },
    { name: `last ${traffic ? duration(traffic.seconds) : "minute"}`, value: (e) => e.recent, text: (e) => number(e.recent) },
    { name: "since the start", value: (e) => e.total, text: (e) => number(e.total) },
  ];
  return errors.length ? table(name, columns, errors, { caption: name }) : null;
}

function drawCharts(history) {
  const points = (value) => history.map((point) => ({ at: point.at, value: value(point) }));
  drawLine(byId("chart-hits"), points((p) => (p.prompt_tokens ? p.cached_tokens / p.prompt_tokens : null)), {
    most: 1,
    format: share,
    title: "Cache hit rate",
    others: points((p) => bestHeld(p.prompt_tokens, p.cached_tokens, p.predicted_prompt_tokens, p.reachable_tokens)),
  });
  drawLine(byId("chart-saved"), points((p) => p.cached_tokens / p.seconds), { most: null, format: (value) => `${short(value)}/s`, title: "Prefill tokens saved per second" });
  drawLine(byId("chart-active"), points((p) => p.active_share), { most: 1, format: share, title: "Share of KV blocks in use" });
}

const rankColumns = [
  { name: "rank", isText: true, value: (r) => r.rank },
  { name: "address", isText: true, value: (r) => r.endpoint },
  { name: "KV blocks in use", value: (r) => (r.total_blocks ? r.active_blocks / r.total_blocks : r.active_blocks), cell: (r) => used(r) },
  { name: "prefill tokens", value: (r) => r.prefill_tokens, text: (r) => number(r.prefill_tokens) },
  { name: "requests", value: (r) => r.requests, text: (r) => (r.queued ? `${number(r.requests)} + ${number(r.queued)} queued` : number(r.requests)) },
  { name: "cached blocks", value: (r) => r.cached_blocks, text: (r) => number(r.cached_blocks) },
  { name: "hits predicted", value: (r) => r.hits_predicted, text: (r) => share(r.hits_predicted) },
  { name: "hits found", value: (r) => r.hits_found, text: (r) => share(r.hits_found) },
  { name: "event lag", value: (r) => r.lag_seconds, text: (r) => duration(r.lag_seconds) },
  { name: "state", isText: true, wide: true, value: (r) => r.notes.map((n) => n.what).join(", "), cell: (r) => notes(r) },
];

function used(rank) {
  const text = ` ${short(rank.active_blocks)}${rank.total_blocks ? ` / ${short(rank.total_blocks)}` : ""}`;
  if (!rank.total_blocks) return [text];
  const value = Math.min(1, rank.active_blocks / rank.total_blocks);
  return [element("meter", { min: 0, max: 1, low: 0.7, high: 0.9, optimum: 0, value, "aria-label": "KV blocks in use" }), element("span", { className: "amount", text })];
}

function notes(rank) {
  if (!rank.notes.length) return [element("span", { text: "ok", className: "good" })];
  return rank.notes.flatMap((note, i) => [i ? ", " : "", element("span", { text: note.what, className: note.severity })]);
}

const worst = (rank) => (rank.notes.some((n) => n.severity === "error") ? "error-item" : rank.notes.length ? "warning-item" : "");

function tiles(component) {
  const made = element("div", { className: "tiles", role: "group", "aria-label": `Ranks of ${component.name}, filled by KV blocks in use` });
  for (const rank of component.ranks) {
    const value = rank.total_blocks ? Math.min(1, rank.active_blocks / rank.total_blocks) : 0;
    const words = `rank ${rank.rank}: ${share(value)} of the KV blocks, ${number(rank.requests)} requests, ${rank.notes.map((n) => n.what).join(", ") || "ok"}`;
    const tile = element("button", { className: `tile ${worst(rank)}`, type: "button", title: words, "aria-label": words });
    tile.dataset.focus = `${component.name}/${rank.rank}/tile`;
    const fill = element("i");
    fill.style.height = `${Math.round(100 * value)}%`;
    tile.append(fill);
    tile.addEventListener("click", () => {
      state.marked = `${component.name}/${rank.rank}`;
      draw();
      document.querySelector("tr.marked")?.scrollIntoView({ block: "center" });
    });
    made.append(tile);
  }
  return made;
}

function drawFleet(components) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = (rank) => {
    const text = `${rank.rank} ${rank.endpoint} ${rank.notes.map((n) => n.what).join(" ") || "ok"}`.toLowerCase();
    return words.every((word) => text.includes(word)) && (!byId("only-notes").checked || rank.notes.length);
  };
  const made = components.map((component) => {
    const rows = component.ranks.filter(wanted);
    const role = component.role === "both" ? "" : `, ${component.role}`;
    const queue = component.queued ? `, ${number(component.queued)} of at most ${number(component.queue_capacity)} queued, the oldest for ${duration(component.queue_oldest_seconds)}` : "";
    const about = ` model ${component.model}${role}, mode ${component.mode}, hits predicted ${share(component.hits_predicted)}, found ${share(component.hits_found)}, best rank held ${share(component.hits_possible)} in the last minute${component.hits_note ? `; ${component.hits_note}` : ""}${queue}`;
    const shown = rows.length === component.ranks.length ? "" : element("p", { className: "quiet", text: `${rows.length} of ${component.ranks.length} ranks` });
    return element(
      "div",
      {},
      element("h3", { text: component.name }, element("small", { text: about })),
      tiles(component),
      shown,
      table(`fleet ${component.name}`, rankColumns, rows, {
        caption: `Ranks of ${component.name}`,
        rowClass: (rank) => (`${component.name}/${rank.rank}` === state.marked ? "marked" : ""),
      }),
    );
  });
  byId("components").replaceChildren(...(made.length ? made : [element("p", { text: "No worker is registered.", className: "quiet" })]));
}

function drawDecisions(decisions) {
  const severalComponents = new Set(decisions.map((each) => each.component)).size > 1;
  const latest = [...decisions].sort((a, b) => b.at - a.at).slice(0, DECISIONS);
  // An opened decision stays, though it is no longer among the latest.
  const kept = [...state.open.values()].filter((each) => !latest.some((other) => other.id === each.id && other.scheduler === each.scheduler));
  const made = [...latest, ...kept].map((decision) => {
    const name = `${decision.scheduler}/${decision.id}`;
    const cached = decision.candidates.length && decision.rank ? decision.candidates[0].overlap_blocks : null;
    const [best, next] = decision.rank ? decision.candidates : [];
    const costs = best && best.cost !== null ? ` ${cost(best.cost, decision.mode)}${next && next.cost !== null ? `; next ${next.rank} ${cost(next.cost, decision.mode)}` : ""}` : "";
    const why = `${decision.mode}: ${decision.reason}${costs}${decision.load_only ? "; on load alone" : ""}${decision.model_choice ? `; model chosen as ${decision.model_choice}` : ""}${decision.prefill ? `; ${decision.prefill}` : ""}${decision.queued_ms ? `; queued for ${duration(decision.queued_ms / 1000)}` : ""}`;
    const head = element(
      "summary",
      {},
      element("span", { text: clock(decision.at), className: "quiet" }),
      decision.request ? copied(decision.request) : element("span", { text: "(not booked)" }),
      element("span", { text: (decision.rank ?? "none") + (severalComponents ? ` ${decision.component}` : ""), className: decision.rank ? "" : "error" }),
      element("span", { text: `${number(cached)} / ${number(decision.prompt_blocks)} blocks cached`, className: "quiet" }),
      element("span", { text: why, title: why }),
    );
    head.dataset.focus = `decision ${name}`;
    const details = element("details", {}, head);
    if (state.open.has(name)) {
      details.open = true;
      details.append(candidates(state.open.get(name)));
    }
    details.addEventListener("toggle", () => toggle(details, decision, name));
    return details;
  });
  byId("decisions").className = severalComponents ? "several" : "";
  byId("decisions").replaceChildren(...(made.length ? made : [element("p", { text: "No decisions yet.", className: "quiet" })]));
}

async function toggle(details, decision, name) {
  if (!details.open) {
    state.open.delete(name);
    return;
  }
  if (state.open.has(name)) return;
  state.open.set(name, decision);
  try {
    const full = await read(`data/decisions/${decision.id}?scheduler=${encodeURIComponent(decision.scheduler)}`);
    state.open.set(name, full);
    details.append(candidates(full));
  } catch (error) {
    details.append(element("p", { text: `Not available: ${error.message}`, className: "error" }));
  }
}

function candidates(decision) {
  const weighed = decision.candidates.filter((each) => !each.excluded);
  const names = [...new Set(weighed.flatMap((each) => Object.keys(each.terms)))];
  const terms = names.filter((name) => weighed.length < 2 || weighed.some((each) => each.terms[name] !== weighed[0].terms[name]));
  const leftOut = weighed.length < decision.candidates.length ? [{ name: "left out", isText: true, wide: true, value: (c) => c.excluded }] : [];
  const columns = [
    { name: "rank", isText: true, value: (c) => c.rank },
    { name: "cost", value: (c) => c.cost, text: (c) => cost(c.cost, decision.mode) },
    { name: "cached blocks", value: (c) => c.overlap_blocks, text: (c) => number(c.overlap_blocks) },
    ...(decision.candidates.some((each) => each.lower_blocks) ? [{ name: "of them in lower tiers", value: (c) => c.lower_blocks, text: (c) => number(c.lower_blocks) }] : []),
    ...terms.map((name) => ({ name: name.replace(/_(ms|blocks|tokens)$/, ", $1").replaceAll("_", " "), value: (c) => c.terms[name] ?? null, text: (c) => (name in c.terms ? term(c.terms[name]) : "–") })),
    ...leftOut,
  ];
  return table(`decision ${decision.scheduler}/${decision.id}`, columns, decision.candidates, {
    caption: `Candidates of decision ${decision.id}`,
    rowClass: (c) => (c.rank === decision.rank ? "chosen" : ""),
  });
}

function drawPrefixes(prefixes) {
  if (!prefixes.length) {
    byId("prefixes").replaceChildren(element("p", { text: "No prefix was in enough recent requests yet (about 8; one request in four is looked at).", className: "quiet" }));
    return;
  }
  const columns = [
    { name: "prefix", isText: true, value: (p) => p.id, cell: (p) => [copied(p.id)] },
    { name: "model", isText: true, value: (p) => p.model },
    { name: "tokens", value: (p) => p.tokens, text: (p) => number(p.tokens) },
    { name: "recent requests, about", value: (p) => p.requests, text: (p) => number(p.requests) },
    { name: "ranks that hold it", value: (p) => p.ranks, text: (p) => number(p.ranks) },
  ];
  byId("prefixes").replaceChildren(table("prefixes", columns, prefixes, { caption: "Popular prefixes, as this Frontend sees them" }));
}

function drawServices(services) {
  const columns = [
    { name: "service", isText: true, value: (s) => s.kind },
    { name: "id", isText: true, value: (s) => s.name, cell: (s) => (s.name ? [copied(s.name)] : []) },
    { name: "address", isText: true, value: (s) => s.address, cell: (s) => [copied(s.address)] },
    { name: "state", isText: true, value: (s) => s.state, cell: (s) => [element("span", { text: s.state, className: { ready: "good", away: "error" }[s.state] ?? "warning" })] },
    { name: "detail", isText: true, wide: true, value: (s) => s.detail },
  ];
  byId("services").replaceChildren(table("services", columns, services, { caption: "Services" }));
}

function draw() {
  const data = state.data;
  if (!data) return;
  // What is drawn anew keeps the focus and the scroll positions.
  const focused = document.activeElement?.dataset?.focus;
  const scrolled = new Map([...document.querySelectorAll("[data-scroll]")].map((each) => [each.dataset.scroll, [each.scrollLeft, each.scrollTop]]));
  drawProblems(data.problems);
  drawFigures(data);
  drawTraffic(data.traffic);
  drawCharts(data.history);
  drawFleet(data.components);
  drawDecisions(data.decisions);
  drawPrefixes(data.prefixes);
  drawServices(data.services);
  for (const each of document.querySelectorAll("[data-scroll]")) {
    [each.scrollLeft, each.scrollTop] = scrolled.get(each.dataset.scroll) ?? [0, 0];
  }
  if (focused) [...document.querySelectorAll("[data-focus]")].find((each) => each.dataset.focus === focused)?.focus({ preventScroll: true });
}

// Reading

class Refused extends Error {}

async function read(path) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: AbortSignal.timeout(10000) });
  const body = await response.json().catch(() => ({}));
  if (response.status === 401 || response.status === 403) throw new Refused(body.error?.message ?? "refused");
  if (!response.ok) throw new Error(body.error?.message ?? `status ${response.status}`);
  return body;
}

async function update() {
  try {
    state.data = await read("data/overview");
    byId("login").hidden = true;
    byId("main").hidden = false;
    byId("freshness").textContent = `as of ${clock(state.data.at)}`;
    byId("freshness").className = "";
    draw();
  } catch (error) {
    if (error instanceof Refused) {
      askForKey(error.message);
      return;
    }
    byId("freshness").textContent = `this Frontend does not answer: ${error.message}`;
    byId("freshness").className = "error";
  }
  schedule();
}

function schedule() {
  clearTimeout(state.timer);
  if (!state.paused && !document.hidden) state.timer = setTimeout(update, INTERVAL_MS);
}

function askForKey(why) {
  const had = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  byId("main").hidden = true;
  byId("login").hidden = false;
  byId("refused").textContent = had ? why : "";
  byId("freshness").textContent = "";
  byId("key").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  update();
});
byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  byId("pause").textContent = state.paused ? "Resume" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  if (!state.paused) update();
});
byId("filter").addEventListener("input", draw);
byId("only-notes").addEventListener("change", draw);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !state.paused) update();
});
update();

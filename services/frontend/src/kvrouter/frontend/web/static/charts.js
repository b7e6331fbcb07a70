// Line charts over the time that is known, as SVG.

const WIDTH = 600;
const HEIGHT = 120;
const TOP = 8;
const BOTTOM = 112;
const LEAST_SECONDS = 600;
const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function label(className, text) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}

/**
 * Draws points {at, value}; a value of null leaves a gap.
 * @param {HTMLElement} place replaced content
 * @param {{at: number, value: ?number}[]} points oldest first, times in Unix seconds
 * @param {{most: ?number, format: function(number): string, title: string, others: ?Array}} options most: value of the
 *   upper edge; others: points of a second, dashed line
 */
export function drawLine(place, points, { most, format, title, others = [] }) {
  const known = points.filter((point) => point.value !== null);
  const end = points.length ? points[points.length - 1].at : 0;
  const span = Math.max(LEAST_SECONDS, points.length ? end - points[0].at : 0);
  const upper = most ?? Math.max(1e-9, ...known.map((point) => point.value));
  const x = (at) => WIDTH * (1 - (end - at) / span);
  const y = (value) => BOTTOM - (BOTTOM - TOP) * Math.min(1, value / upper);

  // A point without neighbours is a line of no length, which its round ends show.
  const linePath = (run) => (run.length === 1 ? [run[0], run[0]] : run).map((point, i) => `${i ? "L" : "M"}${x(point.at).toFixed(1)} ${y(point.value).toFixed(1)}`).join(" ");

  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const latest = known.length ? known[known.length - 1] : null;
  const last = latest ? `${latest.at === end ? "now" : "latest"} ${format(latest.value)}` : "no data yet";
  svg.append(Object.assign(shape("title", {}), { textContent: `${title}: ${last}` }));
  for (const share of [0, 0.5, 1]) {
    const height = BOTTOM - (BOTTOM - TOP) * share;
    svg.append(shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: height, y2: height }));
  }
  for (const run of runs(points)) {
    const path = linePath(run);
    const close = `L${x(run[run.length - 1].at).toFixed(1)} ${BOTTOM} L${x(run[0].at).toFixed(1)} ${BOTTOM} Z`;
    svg.append(shape("path", { class: "area", d: `${path} ${close}` }), shape("path", { class: lineClass(run), d: path }));
  }

  for (const run of runs(others)) {
    svg.append(shape("path", { class: `${lineClass(run)} other`, d: linePath(run) }));
  }

  const chart = document.createElement("div");
  chart.className = "chart";
  const below = document.createElement("div");
  below.className = "x";
  below.append(label("", `${Math.round(span / 60)} min ago`), label("", last));
  chart.append(label("y top", format(upper)), label("y bottom", format(0)), svg, below);
  place.replaceChildren(chart);
}

const lineClass = (run) => (run.length === 1 ? "line dot" : "line");

function runs(points) {
  const found = [];
  let run = [];
  for (const point of points) {
    if (point.value === null) {
      run = [];
      continue;
    }
    if (!run.length) found.push(run);
    run.push(point);
  }
  return found;
}

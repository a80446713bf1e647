# SPDX-License-Identifier: Apache-2.0
"""The ranks' timelines as one HTML file that needs nothing else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>vllm doctor</title><style>
body { font: 14px system-ui, sans-serif; margin: 20px; color: #1c2330; background: #fff }
#finding { max-width: 1100px; padding: 10px 14px; border-left: 5px solid #2a9d5c; background: #f1f8f4 }
#finding.fault { border-color: #d01c1c; background: #fdf1f1 }
.key { display: inline-block; width: 13px; height: 13px; margin: 0 5px 0 16px; vertical-align: -2px }
svg text { font: 12px system-ui, sans-serif; fill: #1c2330 }
.skew { stroke: #56617a; opacity: .6; fill: none }
.mismatch { fill: none; stroke: #d01c1c; stroke-width: 2.5 } .absent { fill: #d01c1c18; stroke-dasharray: 6 4 }
#mismatch text { fill: #b01010; font-weight: 600; paint-order: stroke; stroke: #fff; stroke-width: 4px }
</style></head><body><h1 style="font-size: 20px">Collectives of the ranks</h1><p id="finding"></p><p id="legend"></p>
<p><button id="near">close-up</button> <button id="whole">whole run</button> The wheel zooms, with shift it moves.
Grey lines join the ranks' arrivals at one collective: the more they lean, the wider the skew.</p><div id="chart"></div>
<script>
const data = DATA, byId = id => document.getElementById(id);
const colors = ["#3b6fb6", "#e08a1e", "#3f9e6e", "#8a5cc2", "#c2548a", "#8a6d3b", "#2f9fb5", "#6b7280"];
const all = data.ranks.flatMap(r => r.entries), ops = [...new Set(all.map(e => e.op))];
const color = op => colors[ops.indexOf(op) % colors.length], stop = e => e.end === null ? data.newest : e.end;
const marked = e => e.group === data.group && e.seq === data.seq;
const first = Math.min(...all.map(e => e.start), data.newest), last = Math.max(...all.map(stop), first + 1e-4);
byId("finding").textContent = data.text;
byId("finding").className = data.is_fault ? "fault" : "";
const box = style => Object.assign(document.createElement("span"), {className: "key", style});
const key = (style, text) => byId("legend").append(box(style), text);
ops.forEach(op => key("background: " + color(op), op));
key("background: #e9edf3", "outside any collective");
key("background: repeating-linear-gradient(-45deg, #888 0 3px, #ddd 3px 7px)", "not finished or failed");
if (data.is_fault) key("box-shadow: inset 0 0 0 2.5px #d01c1c", "the fault");
const calls = {}, left = 70, top_ = 50, high = 34, pitch = 80;
data.ranks.forEach((r, lane) => r.entries.forEach(e => (calls[e.group + "#" + e.seq] ??= []).push([lane, e])));
const width = Math.max(900, Math.min(innerWidth - 45, 1800)), inner = width - left - 12;
const height = top_ + pitch * data.ranks.length + 20;
let from, to;
const add = (parent, name, attributes, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const k in attributes) node.setAttribute(k, attributes[k]);
  node.textContent = text;
  return parent.appendChild(node);
};
function show(begin, end) {
  [from, to] = [begin, end];
  byId("chart").textContent = "";
  const svg = add(byId("chart"), "svg", {width, height}), seen = e => stop(e) >= from && e.start <= to;
  const x = t => left + Math.max(-1, Math.min(2, (t - from) / (to - from))) * inner, y = lane => top_ + pitch * lane;
  add(add(svg, "clipPath", {id: "clip"}), "rect", {x: left, y: 0, width: inner, height});
  const hatch = {id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"};
  add(add(svg, "pattern", hatch), "rect", {width: 3, height: 7, fill: "#fff", opacity: .6});
  const body = add(svg, "g", {"clip-path": "url(#clip)"}), unit = 10 ** Math.floor(Math.log10((to - from) / 4));
  const tick = [1, 2, 5, 10].map(m => m * unit).find(s => (to - from) / s < 9);
  for (let t = Math.ceil((from - first) / tick) * tick; first + t < to; t += tick) {
    add(body, "line", {x1: x(first + t), x2: x(first + t), y1: 22, y2: height, stroke: "#e3e7ee"});
    add(body, "text", {x: x(first + t) + 3, y: 18}, tick < .1 ? (1e3 * t).toFixed(2) + " ms" : t.toFixed(1) + " s");
  }
  data.ranks.forEach((r, lane) => {
    add(svg, "text", {x: 8, y: y(lane) + 22, class: "lane"}, "rank " + r.rank);
    add(body, "rect", {x: left, y: y(lane), width: inner, height: high, fill: "#e9edf3"});
    r.entries.forEach((e, i) => {
      if (!seen(e)) return;
      const at = {x: x(e.start), y: y(lane), width: Math.max(x(stop(e)) - x(e.start), 1.5), height: high};
      const took = e.end === null ? "not finished" : (1e3 * (e.end - e.start)).toFixed(3) + " ms";
      const told = ["step", "layer", "path", "sizes", "shapes", "dtypes"].map(k => `${k}: ${JSON.stringify(e[k])}`);
      const text = [`rank ${r.rank}: ${e.op} #${e.seq} of ${e.group}`, ...told, took, e.error].join("\\n");
      add(add(body, "rect", {...at, fill: color(e.op), stroke: "#fff", "stroke-width": .6}), "title", {}, text);
      if (e.end === null || e.error) add(body, "rect", {...at, fill: "url(#hatch)", "pointer-events": "none"});
      if (!i || r.entries[i - 1].step !== e.step) add(body, "text", {x: at.x, y: y(lane) - 5}, "step " + e.step);
    });
  });
  const arrival = ([lane, e]) => `${x(e.start)},${y(lane)} ${x(e.start)},${y(lane) + high}`;
  for (const call of Object.values(calls)) if (call.some(([, e]) => seen(e)))
    add(body, "polyline", {class: "skew", points: call.map(arrival).join(" ")});
  const mark = data.is_fault && data.seq >= 0 ? add(body, "g", {id: "mismatch"}) : null;
  if (mark) data.ranks.forEach((r, lane) => {
    const own = r.entries.find(marked), start = own ? own.start : stop(r.entries.at(-1) ?? {end: first});
    if (!own && !data.blamed.includes(r.rank)) return;
    const wide = Math.max(x(own ? stop(own) : last) - x(start), 6);
    const at = {x: x(start), y: y(lane) - 2, width: wide, height: high + 4};
    add(mark, "rect", {...at, class: own ? "mismatch" : "mismatch absent", "data-rank": r.rank});
    const text = own ? `${own.op} #${own.seq} of ${own.group}, step ${own.step}, ${own.layer || "no layer"}`
      : `rank ${r.rank} does not come to #${data.seq} of ${data.group}`, late = at.x > left + inner * .7;
    add(mark, "text", {x: at.x + (late ? 8 : 2), y: y(lane) + high + 16, "text-anchor": late ? "end" : "start"}, text);
  });
}
const end = Math.max(...all.filter(marked).map(e => e.start), data.seq < 0 ? last : first);
const before = all.map(e => e.start).filter(t => t <= end).sort((a, b) => a - b).at(-12 * data.ranks.length) ?? first;
const near = () => show(before - (end - before) / 50, Math.min(end + (end - before) * .6 + 1e-4, last + 1e-4));
byId("near").onclick = near;
byId("whole").onclick = () => show(first - (last - first) / 50, last + (last - first) / 50);
byId("chart").addEventListener("wheel", event => {
  event.preventDefault();
  const at = from + (to - from) * (event.offsetX - left) / inner, turn = Math.sign(event.deltaY || event.deltaX);
  if (event.shiftKey) show(from + turn * (to - from) / 10, to + turn * (to - from) / 10);
  else show(at - (at - from) * 1.25 ** turn, at + (to - at) * 1.25 ** turn);
}, {passive: false});
near();
</script></body></html>
"""


def draw(ledgers: dict[int, Any], finding: Any) -> str:
    """The page for the doctor's ledgers by rank and its finding."""
    ranks = [{"rank": rank, "entries": ledger.entries} for rank, ledger in sorted(ledgers.items())]
    newest = max(ledger.about["alive"] for ledger in ledgers.values())
    data = json.dumps({**dataclasses.asdict(finding), "newest": newest, "ranks": ranks})
    return _PAGE.replace("DATA", data.replace("<", "\\u003c"), 1)

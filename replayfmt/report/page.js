// Hands the figures to plotly.js and the tables to DataTables, and connects the two.
(() => {
  "use strict";
  const figures = window.reportFigures;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const tables = new Map(); // by the id of the element around each
  let printing = false;

  const theme = () => {
    const night = dark.matches && !printing;
    const [text, line] = night ? ["#d6d9dc", "#3c4146"] : ["#24292f", "#dfe3e8"];
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line };
    return { text, axis, surface: night ? "#22262a" : "#ffffff" };
  };

  // Paper is narrower than the window, and what is too wide for it is cut off: `.printing` says how wide it is.
  const themed = (layout, element) => {
    const { text, axis, surface } = theme();
    return {
      ...layout,
      width: printing ? element.clientWidth : undefined,
      autosize: !printing,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: surface, bordercolor: text, font: { color: text }, align: "left" },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
      margin: { l: 10, r: 15, t: 30, b: 40, ...layout.margin },
      hovermode: "closest",
      dragmode: layout.dragmode ?? false,
    };
  };

  // A colour of its own where the background is dark: the others can be told from both. Ends of intervals are drawn as text
  // is.
  const coloured = (data) => {
    const blue = dark.matches && !printing ? "#4aa3df" : "#0072B2";
    const { text } = theme();
    return data.map((trace) => {
      const part = trace.marker ? "marker" : "line";
      const own = trace[part].color === "#0072B2" ? { [part]: { ...trace[part], color: blue } } : {};
      const ends = trace.error_x ? { error_x: { ...trace.error_x, color: text } } : {};
      return { ...trace, ...own, ...ends };
    });
  };

  const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false, locale: "en" };

  // ------------------------------------------------------------------------------------------------------- tables

  const showRow = (name, find) => {
    for (const [id, table] of tables) {
      const row = table.row(`#${CSS.escape(name)}`);
      if (!row.any()) continue;
      table.search(find ?? "");
      table.draw();
      const place = table.rows({ search: "applied", order: "applied" }).indexes().indexOf(row.index());
      if (place < 0) return showRow(name, "");
      table.page(Math.floor(place / table.page.len())).draw("page");
      document.querySelectorAll("tr.found").forEach((each) => each.classList.remove("found"));
      row.node().classList.add("found");
      row.node().scrollIntoView({ block: "center" });
      return true;
    }
    return false;
  };

  document.querySelectorAll(".table").forEach((place) => {
    const element = place.querySelector("table");
    if (!element) return;
    const by = element.dataset.sortedBy;
    const small = element.tBodies[0].rows.length <= 10;
    const table = new window.DataTables.default(element, {
      order: by === "" ? [] : [[Number(by), "desc"]],
      pageLength: 10,
      lengthMenu: [10, 25, 100, { label: "all", value: -1 }],
      autoWidth: false,
      orderMulti: true,
      layout: small
        ? { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null }
        : { topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging" },
      language: { search: "Filter", lengthMenu: "_MENU_ rows", info: "_START_ to _END_ of _TOTAL_", infoFiltered: "(of _MAX_)" },
    });
    tables.set(place.id, table);
    place.querySelector(".dt-layout-table")?.classList.add("scrolls");
  });

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-find]");
    if (link && showRow(link.getAttribute("href").slice(1), link.dataset.find)) event.preventDefault();
  });

  // ----------------------------------------------------------------------------------------------------- timeline

  // Bars come by lane and start. Neighbours share a bar where together they are no wider than three pixels.
  const summed = (differences) => {
    let total = 0;
    return Float64Array.from(differences, (each) => (total += each));
  };

  const readBars = (raw) => ({ ...raw, start: summed(raw.start), ordinal: summed(raw.ordinal) });

  const chosenBars = (bars, from, to, pixel) => {
    const found = [];
    let last = null;
    for (let i = 0; i < bars.lane.length; i++) {
      const start = bars.start[i];
      const end = start + bars.span[i];
      if (end < from || start > to) continue;
      const busy = bars.busy ? bars.busy[i] : bars.span[i];
      const count = bars.count ? bars.count[i] : 1;
      if (last && last.lane === bars.lane[i] && Math.max(end, last.end) - last.start <= 3 * pixel) {
        last.end = Math.max(end, last.end);
        last.count += count;
        last.busy += busy;
        if (busy > last.longest) [last.longest, last.i] = [busy, i];
        continue;
      }
      last = { lane: bars.lane[i], start, end, count, busy, longest: busy, i };
      found.push(last);
    }
    return found;
  };

  const seconds = (nanoseconds) => {
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
      if (nanoseconds >= size) return `${Number((nanoseconds / size).toPrecision(4))} ${unit}`;
    return `${nanoseconds} ns`;
  };

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const shortened = (text, most = 90) =>
    text.length > most ? `${text.slice(0, Math.floor((most * 2) / 3))}…${text.slice(1 - Math.floor(most / 3))}` : text;

  const drawTimeline = (element, timeline) => {
    const ops = readBars(timeline.bars);
    const scopes = readBars(timeline.scopes);
    // When a place in the picture was: pauses have less room than they took.
    const time = (place) =>
      timeline.pauses.reduce((sum, [from, to, taken]) => sum + (Math.min(1, Math.max(0, (place - from) / (to - from))) * (taken - to + from)), place);
    const ends = (bars) => bars.lane.reduce((most, _lane, i) => Math.max(most, bars.start[i] + bars.span[i]), 0);
    const whole = Math.max(ends(ops), ends(scopes), 1);
    const told = document.createElement("p");
    told.className = "note told";
    element.after(told);

    // Lines through the launches of each collective, from the first rank to the last, while there are few.
    const linked = new Set(timeline.linked);
    const links = (from, to) => {
      const bySite = new Map();
      for (let i = 0; linked.size && i < ops.lane.length; i++) {
        if (!ops.site[i] || !linked.has(ops.name[i]) || ops.start[i] < from || ops.start[i] > to) continue;
        bySite.set(ops.site[i], [...(bySite.get(ops.site[i]) ?? []), { lane: ops.lane[i], start: ops.start[i] }]);
      }
      const chains = [...bySite.values()].filter((bars) => bars.length > 1);
      if (!chains.length || chains.length > 300) return [];
      const [x, y] = [[], []];
      for (const bars of chains) {
        bars.sort((one, other) => one.start - other.start);
        for (const bar of bars) [x[x.length], y[y.length]] = [bar.start / 1e9, bar.lane];
        [x[x.length], y[y.length]] = [null, null];
      }
      return [{ type: "scatter", mode: "lines+markers", name: "one collective", x, y, hoverinfo: "skip", line: { color: "#0072B2", width: 1 }, marker: { size: 4, color: "#0072B2" } }];
    };

    const traces = (from, to) => {
      const pixel = (to - from) / Math.max(300, element.clientWidth);
      const groups = new Map();
      let mostOps = 0;
      let bars = 0;
      let shown = 0;
      const add = (kind, raw, chosen) => {
        for (const bar of chosen) {
          const colour = kind === "scope" ? "#9aa4ae" : (timeline.coloured[raw.name[bar.i]] ?? timeline.others);
          const name = kind === "scope" ? "scopes" : colour === timeline.others ? "other kernels" : timeline.names[raw.name[bar.i]];
          if (!groups.has(name)) groups.set(name, { x: [], base: [], y: [], text: [], hovertext: [], customdata: [], colour });
          const group = groups.get(name);
          const what = escaped(shortened(timeline.names[raw.name[bar.i]]));
          const when = `${seconds(Math.round(time(bar.end) - time(bar.start)))}, from ${seconds(Math.round(time(bar.start)))}`;
          const many = bar.count > 1;
          if (kind === "op") [mostOps, bars, shown] = [Math.max(mostOps, bar.count), bars + 1, shown + bar.count];
          group.x.push(Math.max(bar.end - bar.start, pixel / 2) / 1e9);
          group.base.push(bar.start / 1e9);
          group.y.push(bar.lane);
          group.text.push(kind !== "scope" ? "" : many ? `${bar.count} scopes` : escaped(timeline.names[raw.name[bar.i]].split("/").pop()));
          group.customdata.push(many || !raw.site[bar.i] ? "" : `site-${raw.site[bar.i]}`);
          group.hovertext.push(
            kind === "scope" ? (many ? `${bar.count} passes through scopes<br>${when}` : `${what}<br>${when}`)
            : many ? `<b>${bar.count} ops</b>, ${seconds(bar.busy)} in them, most in ${what}<br>${when}`
            : raw.site[bar.i] ? `${what}<br>op ${raw.ordinal[bar.i]}, ${linked.size ? "collective" : "call site"} ${raw.site[bar.i]}<br>${when}`
            : `${what}<br>${when}`, // of a replay's trace, which does not say of which record it is
          );
        }
      };
      add("scope", scopes, chosenBars(scopes, from, to, pixel));
      add("op", ops, chosenBars(ops, from, to, pixel));
      told.textContent =
        mostOps > 1
          ? `${shown.toLocaleString("en")} ops in ${bars.toLocaleString("en")} bars: a bar stands for up to ${mostOps.toLocaleString("en")} ops. Zoom in to see each.`
          : `${shown.toLocaleString("en")} ops, a bar for each.`;
      const drawn = [...groups].map(([name, { colour, ...columns }]) => ({
        type: "bar", orientation: "h", name: escaped(shortened(name, 36)), ...columns,
        hovertemplate: "%{hovertext}<extra></extra>", marker: { color: colour, line: { width: 0 } }, width: 0.8,
        textposition: "inside", insidetextanchor: "middle", textangle: 0, insidetextfont: { color: "#1b1f23" },
      }));
      return [...drawn, ...links(from, to)];
    };

    const layout = {
      barmode: "overlay",
      dragmode: window.matchMedia("(pointer: coarse)").matches ? "pan" : "zoom",
      height: 140 + 34 * timeline.lanes.length,
      xaxis: { range: [0, whole / 1e9], ticksuffix: "s", tickformat: "~s", minallowed: 0, maxallowed: (whole * 1.02) / 1e9 },
      yaxis: { tickvals: timeline.lanes.map((_lane, i) => i), ticktext: timeline.lanes, range: [timeline.lanes.length - 0.5, -0.5], fixedrange: true, automargin: true },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      showlegend: true,
      uniformtext: { mode: "hide", minsize: 10 },
      shapes: timeline.pauses.map(([from, to]) => ({ type: "rect", yref: "paper", y0: 0, y1: 1, x0: from / 1e9, x1: to / 1e9, fillcolor: "rgba(128,128,128,0.25)", line: { width: 0 } })),
      annotations: timeline.pauses.map(([from, to, taken]) => ({ x: (from + to) / 2e9, yref: "paper", y: 0.5, text: seconds(Number(taken.toPrecision(2))), hovertext: `${seconds(taken)} without an op`, textangle: -90, showarrow: false })),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "#8c8c8c", activecolor: "#56b4e9", orientation: "v" },
      margin: { t: 70, r: 40 },
    };
    const redraw = (range) =>
      window.Plotly.react(element, coloured(traces(range[0] * 1e9, range[1] * 1e9)), themed({ ...layout, xaxis: { ...layout.xaxis, range } }, element), timelineConfig);
    const timelineConfig = { ...config, displayModeBar: true, modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d"]], doubleClick: false };
    window.Plotly.newPlot(element, coloured(traces(0, whole)), themed(layout, element), timelineConfig);
    element.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) redraw([0, whole / 1e9]);
      else if ("xaxis.range[0]" in change) redraw([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      else if (change["xaxis.range"]) redraw(change["xaxis.range"]);
    });
    element.on("plotly_doubleclick", () => redraw([0, whole / 1e9]));
    return () => redraw(element.layout.xaxis.range);
  };

  // ----------------------------------------------------------------------------------------------------- pictures

  const redraws = [];
  for (const element of document.querySelectorAll(".picture")) {
    const figure = figures[element.dataset.picture];
    element.style.height = `${figure.timeline ? 140 + 34 * figure.timeline.lanes.length : figure.layout.height}px`;
    if (figure.timeline) redraws.push(drawTimeline(element, figure.timeline));
    else {
      window.Plotly.newPlot(element, coloured(figure.data), themed(figure.layout, element), config);
      redraws.push(() => window.Plotly.react(element, coloured(figure.data), themed(figure.layout, element), config));
    }
    element.on("plotly_click", ({ points }) => {
      if (points[0].customdata) showRow(String(points[0].customdata), "");
    });
  }
  const redrawAll = () => redraws.forEach((redraw) => redraw());
  dark.addEventListener("change", redrawAll);
  for (const [event, now] of [["beforeprint", true], ["afterprint", false]])
    window.addEventListener(event, () => {
      printing = now;
      document.documentElement.classList.toggle("printing", now);
      redrawAll();
      if (!now) document.querySelectorAll(".picture").forEach((each) => window.Plotly.Plots.resize(each));
    });
  if (location.hash) showRow(location.hash.slice(1));
  document.documentElement.dataset.ready = "yes";
})();

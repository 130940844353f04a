// Figures have no colours of a page. They are given the page's, now and whenever it changes.
function chartModels() {
  const models = [];
  for (const document of Bokeh.documents) {
    for (const model of document._all_models.values()) models.push(model);
  }
  return models;
}

function colourCharts() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const text = colour("--text"), line = colour("--line"), box = colour("--box");
  for (const model of chartModels()) {
    switch (model.type) {
      case "Figure":
        model.setv({background_fill_color: box, border_fill_color: box, outline_line_color: line});
        break;
      case "LinearAxis":
        model.setv({
          axis_label_text_color: text, major_label_text_color: text, axis_line_color: line,
          major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal",
        });
        break;
      case "Grid":
        model.setv({grid_line_color: line, grid_line_alpha: 0.6});
        break;
    }
  }
}

function showAxis(column) {
  for (const model of chartModels()) {
    if (model.type == "GlyphRenderer") {
      model.glyph.x = {field: column};
    } else if (model.type == "Figure") {
      model.below[0].axis_label = column == "step" ? "optimizer steps" : "hours of training";
      model.reset.emit();
    }
  }
}

function showRun(number, isShown) {
  for (const model of chartModels()) {
    if (model.tags.includes(`run ${number}`)) model.visible = isShown;
  }
}

// Until they are there: Bokeh draws when the page has been read.
function whenDrawn(callback) {
  const numPlaces = document.querySelectorAll("figure").length;
  if (numPlaces == 0) return;
  const numFigures = chartModels().filter((model) => model.type == "Figure").length;
  if (numFigures == numPlaces) callback(); else setTimeout(() => whenDrawn(callback), 20);
}

const axis = sessionStorage.getItem("axis") || "step";
for (const input of document.querySelectorAll("input[name=axis]")) {
  input.checked = input.value == axis;
  input.addEventListener("change", () => {
    sessionStorage.setItem("axis", input.value);
    showAxis(input.value);
  });
}
for (const input of document.querySelectorAll("input[name=run]")) {
  input.checked = true;
  input.addEventListener("change", () => showRun(input.value, input.checked));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", colourCharts);
whenDrawn(() => {
  colourCharts();
  if (axis != "step") showAxis(axis);
  document.documentElement.dataset.drawn = document.querySelectorAll("figure").length;
});

// Of a page that is served: reloads it when the runs have got further. A browser that reloads keeps
// its place.
async function followRun(version) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 2000));
    try {
      const answer = await fetch("version", {cache: "no-store"});
      if (answer.ok && (await answer.text()) != version) location.reload();
    } catch (error) {
      // The server is gone. What it has shown stays.
    }
  }
}

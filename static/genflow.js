// Of every page. Everything here is a convenience: each page works without it.

function showLocalTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const date = new Date(time.dateTime);
    const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
    const day = { year, month: "short", day: "numeric", hour: "numeric", minute: "2-digit" };
    time.textContent = date.toLocaleString(undefined, time.closest(".status") ? { timeStyle: "medium" } : day);
    time.title = date.toLocaleString();
  }
}

function watchPictures(root) {
  for (const image of root.querySelectorAll("img[src*='/pictures/']")) {
    image.addEventListener("error", () => markGone(image));
    if (image.complete && image.currentSrc && !image.naturalWidth) markGone(image);
  }
}

function markGone(image) {
  const note = document.createElement("span");
  note.className = `${image.className} gone`;
  note.textContent = "The picture is gone";
  image.replaceWith(note);
}

function dress(root) {
  showLocalTimes(root);
  watchPictures(root);
}

// One press of a button is enough, however long the answer takes.
document.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (button?.ariaDisabled === "true") {
    event.preventDefault();
    event.stopPropagation();
  } else if (button) {
    button.ariaDisabled = "true";
    button.dataset.label = button.textContent;
    button.textContent = button.dataset.busy ?? button.textContent;
  }
}, { capture: true });

window.addEventListener("pageshow", async (event) => {
  if (!event.persisted) return;
  // A page that the browser has kept: of somebody who may have logged out since.
  const answer = await fetch(location.href, { method: "HEAD" });
  if (answer.redirected || !answer.ok) return location.reload();
  for (const button of document.querySelectorAll("[aria-disabled]")) {
    button.ariaDisabled = "false";
    button.textContent = button.dataset.label;
  }
});

document.addEventListener("shown", (event) => dress(event.target)); // a piece of the page that is new
dress(document);

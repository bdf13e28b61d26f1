"use strict";
document.documentElement.classList.add("scripted");

// Several plans: one at a time.
const plans = [...document.querySelectorAll("article.plan")];
function showPlan(id) {
  for (const plan of plans) plan.hidden = plan.id !== id;
  for (const link of document.querySelectorAll("[data-plan]")) {
    if (link.dataset.plan === id) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

// One close-up at a time, beside the drawing.
function showWeight(id, focus) {
  const wanted = document.getElementById(id);
  if (!wanted) return;
  const row = wanted.parentElement;
  for (const each of row.querySelectorAll(".closeup")) each.classList.toggle("shown", each.dataset.of === wanted.dataset.of);
  for (const link of row.closest(".plan").querySelectorAll("a.weight")) {
    const chosen = link.getAttribute("href") === "#" + id;
    link.classList.toggle("chosen", chosen);
    if (chosen) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  row.classList.toggle("open", focus);
  if (focus) wanted.focus({ preventScroll: true });
}

function follow(focus) {
  const id = decodeURIComponent(location.hash.slice(1));
  const target = id && document.getElementById(id);
  const plan = target && target.closest("article.plan");
  showPlan(plan ? plan.id : plans[0].id);
  if (target && target.classList.contains("closeup")) showWeight(id, focus);
}

// At first that of the first weight which is split, within a block.
for (const plan of plans) {
  const within = plan.querySelectorAll(".block ~ .block a.weight:has(.glyph.split)");
  const first = within[0] || plan.querySelector("a.weight:has(.glyph.split)") || plan.querySelector("a.weight");
  if (first) showWeight(first.getAttribute("href").slice(1), false);
}
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.weight");
  if (link) {
    event.preventDefault();
    history.replaceState(null, "", link.getAttribute("href"));
    showWeight(link.getAttribute("href").slice(1), true);
  }
  if (event.target.closest("[data-plan]")) {
    event.preventDefault();
    showPlan(event.target.closest("[data-plan]").dataset.plan);
  }
  if (event.target.closest(".close")) document.querySelectorAll(".closeups").forEach((c) => c.classList.remove("open"));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    document.querySelectorAll(".closeups").forEach((c) => c.classList.remove("open"));
    hide();
  }
});
addEventListener("hashchange", () => follow(true));
follow(false);

// What is pointed at, or has the focus, is explained at once.
const tip = document.getElementById("tip");
function hide() { tip.hidden = true; }
for (const title of document.querySelectorAll("svg title")) {
  const on = title.parentElement;
  on.dataset.tip = title.textContent;
  on.setAttribute("aria-label", title.textContent);
  title.remove();
}
function tell(event) {
  const on = event.target.closest && event.target.closest("[data-tip]");
  if (!on) return hide();
  const box = on.getBoundingClientRect();
  tip.textContent = on.dataset.tip;
  tip.hidden = false;
  const x = event.type === "focusin" ? box.left + box.width / 2 : event.clientX;
  const y = event.type === "focusin" ? box.bottom : event.clientY;
  tip.style.left = Math.max(8, Math.min(x + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18) + "px";
}
document.addEventListener("mousemove", tell);
document.addEventListener("focusin", tell);
document.addEventListener("focusout", hide);
document.addEventListener("scroll", hide, true);

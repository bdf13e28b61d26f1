"use strict";
document.documentElement.classList.add("scripted");

// Of several plans one is shown at a time.
const plans = [...document.querySelectorAll("article.plan")];
function showPlan(id) {
  for (const plan of plans) plan.hidden = plan.id !== id;
  for (const link of document.querySelectorAll("[data-plan]")) mark(link, link.dataset.plan === id);
}

// Of the weights of a plan those of one step are shown, beside the steps.
function showWeight(id) {
  const wanted = document.getElementById(id);
  const plan = wanted.closest(".plan");
  for (const each of plan.querySelectorAll(".closeup")) each.classList.toggle("shown", each.dataset.of === wanted.dataset.of);
  for (const link of plan.querySelectorAll("a.weight")) mark(link, link.getAttribute("href") === "#" + wanted.dataset.of);
}

function mark(link, chosen) {
  if (chosen) link.setAttribute("aria-current", "true");
  else link.removeAttribute("aria-current");
}

function follow() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const plan = target && target.closest("article.plan");
  showPlan(plan ? plan.id : plans[0].id);
  if (target && target.classList.contains("closeup")) {
    showWeight(target.id);
    target.focus({ preventScroll: innerWidth >= 1040 });
  }
}

// At first: the first sharded weight of a block.
for (const plan of plans) {
  const first = plan.querySelector(".block ~ .block a.weight:has(.split)") || plan.querySelector("a.weight:has(.split)") || plan.querySelector("a.weight");
  if (first) showWeight(first.getAttribute("href").slice(1));
}
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.weight, [data-plan]");
  if (!link) return;
  event.preventDefault();
  history.replaceState(null, "", link.getAttribute("href"));
  follow();
});
addEventListener("hashchange", follow);
follow();

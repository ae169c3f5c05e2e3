// Takes the page anew every two seconds while somebody looks, unless they are typing, choosing or selecting.
(() => {
  "use strict";
  const busy = () => document.hidden
    || document.querySelector("main :focus, main details[open]")
    || String(getSelection()) !== "";
  const again = async () => {
    if (!busy()) {
      try {
        const answer = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
        if (answer.status === 401) { location.reload(); return; }
        if (!answer.ok) throw new Error(answer.status);
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (!busy()) {
          for (const part of ["header", "main"]) {
            document.querySelector(part).replaceWith(fresh.querySelector(part));
          }
        }
        document.body.classList.remove("stale");
      } catch {
        document.body.classList.add("stale");
      }
    }
    setTimeout(again, 2000);
  };
  setTimeout(again, 2000);
})();

// Begins the page, follows the router's states while somebody looks, and asks for the key.

import { ApiError, apiKey, call, events, setApiKey } from "./api.js";
import { Charts } from "./charts.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Playground, problemNodes } from "./playground.js";

const MIN_WAIT_MS = 1_000;
const MAX_WAIT_MS = 10_000;

const charts = new Charts();
const fleet = new Fleet();
const playground = new Playground(showProblem);
let following = null;

function setLive(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live"), text);
}

function showProblem(error) {
  byId("problem").hidden = false;
  byId("problem").replaceChildren(...problemNodes(error));
  if (error.status === 401) askKey(error);
}

function hideProblem() {
  byId("problem").hidden = true;
}

/** Follow the states until the page is hidden, or this key may not see them. */
async function follow() {
  if (following || document.hidden) return;
  const controller = (following = new AbortController());
  let waitMs = MIN_WAIT_MS;
  while (following === controller) {
    try {
      setLive("connecting", "connecting");
      charts.forget();
      fleet.pause();
      const response = await call("page/state", { signal: controller.signal });
      for await (const state of events(response)) {
        waitMs = MIN_WAIT_MS;
        show(state);
      }
      throw new ApiError("The router ended the connection.", { status: 503 });
    } catch (error) {
      if (following !== controller) return;
      if (error.status === 401 || error.status === 403) {
        stopFollowing();
        refuse(error);
        return;
      }
      setLive("broken", "no connection");
      showProblem(error);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
      waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
    }
  }
}

function stopFollowing() {
  following?.abort();
  following = null;
}

function show(state) {
  if (byId("live").dataset.state !== "live") hideProblem();
  setLive("live", "live");
  byId("figures").hidden = false;
  setText(byId("where"), [state.router.namespace, ...state.router.models].join(" · "));
  charts.add(state);
  fleet.show(state);
  playground.showModels(state.router.models);
}

/** This key, or none, does not open the fleet. The playground may work all the same. */
function refuse(error) {
  byId("key-button").hidden = false;
  byId("figures").hidden = true;
  if (error.status === 401) {
    setLive("locked", "needs a key");
    fleet.forget("The fleet is shown with an operator's key.");
    askKey(error);
    return;
  }
  setLive("locked", apiKey() ? "playground only" : "closed");
  fleet.forget(`${error.message}.`);
  loadModels();
}

async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    playground.showModels(data.map((model) => model.id));
  } catch (error) {
    showProblem(error);
  }
}

// The key.

function askKey(error) {
  byId("key-button").hidden = false;
  if (apiKey()) setText(byId("key-note"), `${error?.message ?? "Another key"}: enter another one, or forget this one.`);
  showKeyDialog();
}

function showKeyDialog() {
  byId("key-forget").hidden = !apiKey();
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", showKeyDialog);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-forget").addEventListener("click", () => useKey(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
});

function useKey(key) {
  setApiKey(key);
  byId("key").value = "";
  byId("key-dialog").close();
  hideProblem();
  stopFollowing();
  follow();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stopFollowing();
    setLive("paused", "paused");
  } else follow();
});

follow();

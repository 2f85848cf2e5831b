// Begins the page, follows the router's states while somebody looks, and asks for the key.

import { ApiError, apiKey, call, events, setApiKey } from "./api.js";
import { Charts } from "./charts.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Playground, problemNodes } from "./playground.js";

const MIN_WAIT_MS = 1_000;
const MAX_WAIT_MS = 10_000;
// A state comes twice a second.
const MAX_SILENCE_MS = 5_000;
const MODELS_WAIT_MS = 2_000;

const charts = new Charts();
const fleet = new Fleet();
const playground = new Playground(showProblem);
let following = null;
let modelsTimer = 0;

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
  const mine = (following = { stream: null });
  clearTimeout(modelsTimer);
  let waitMs = MIN_WAIT_MS;
  setLive("connecting", "connecting");
  while (following === mine) {
    const stream = (mine.stream = new AbortController());
    const watch = () => setTimeout(() => stream.abort(), MAX_SILENCE_MS);
    let timer = watch();
    try {
      charts.forget();
      fleet.pause();
      const response = await call("page/state", { signal: stream.signal });
      for await (const state of events(response)) {
        clearTimeout(timer);
        timer = watch();
        waitMs = MIN_WAIT_MS;
        show(state);
      }
      throw new ApiError("The router ended the connection.", { status: 503 });
    } catch (error) {
      if (following !== mine) return;
      if (error.status === 401 || error.status === 403) {
        stopFollowing();
        refuse(error);
        return;
      }
      const isSilent = stream.signal.aborted;
      setLive("broken", isSilent ? "no contact" : "no connection");
      showProblem(isSilent ? new ApiError(`The router has said nothing for ${MAX_SILENCE_MS / 1000} s.`) : error);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
      waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
    } finally {
      clearTimeout(timer);
    }
  }
}

function stopFollowing() {
  following?.stream.abort();
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
  setText(byId("where"), "");
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

/** Whoever may not see the fleet gets the models from here; while there is none, again and again. */
async function loadModels() {
  clearTimeout(modelsTimer);
  let names = [];
  try {
    const { data } = await (await call("v1/models")).json();
    names = data.map((model) => model.id);
    playground.showModels(names);
  } catch (error) {
    showProblem(error);
    if (error.status === 401) return;
  }
  if (!names.length && !following) modelsTimer = setTimeout(loadModels, MODELS_WAIT_MS);
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

// A connection by HTTP/2: how it is made, and why it failed.
import { ConnectError } from "@connectrpc/connect";
import { Http2SessionManager } from "@connectrpc/connect-node";
import { createPrivateKey, X509Certificate } from "node:crypto";
import type { Http2Session } from "node:http2";
import { isIP } from "node:net";
import { connect, createSecureContext, type SecureContext, type TLSSocket } from "node:tls";

import { invalidRequest } from "./errors.js";

/** A peer that answers no ping for both of these together is gone. Routers allow a ping in 5 s. */
const PING_INTERVAL_MS = 10_000;
const PING_TIMEOUT_MS = 5_000;
/**
 * Megabytes that requests of one connection may hold in Node's HTTP/2. Past it Node refuses every further request, for
 * good where an upload was dropped, and its default of 10 is less than one request may take.
 */
const MAX_MEMORY_MB = 1000;

/** How a client proves who it is, and what it takes for proof. Files as their contents, in PEM. */
export interface TlsOptions {
  /** The authorities whose certificates count. Default: those that Node knows. */
  ca?: string | Uint8Array;
  /** The client's own certificate, where routers want one. */
  cert?: string | Uint8Array;
  /** Its private key. */
  key?: string | Uint8Array;
  /** The name that the router's certificate must have. Default: the host of its address. */
  serverName?: string;
}

/** The connection to `host:port`. It is made when it is first used, and again after each loss. */
export class Connection extends Http2SessionManager {
  readonly #hasTls: boolean;
  readonly #known = new WeakSet<Http2Session>();
  #latest: Http2Session | undefined;
  /** Whether the peer of `#latest` spoke HTTP/2. */
  #isAnswered = false;

  /** @throws QuartetError: a file of `tls` is none; `field` names it. */
  constructor(url: string, host: string, port: number, tls?: TlsOptions) {
    const pings = { pingIntervalMs: PING_INTERVAL_MS, pingTimeoutMs: PING_TIMEOUT_MS, pingIdleConnection: true };
    const dial = tls && connector(host, port, tls);
    super(url, pings, { maxSessionMemory: MAX_MEMORY_MB, ...(dial && { createConnection: dial }) });
    this.#hasTls = tls !== undefined;
  }

  override async connect(): ReturnType<Http2SessionManager["connect"]> {
    const state = await super.connect();
    this.#watch();
    return state;
  }

  override async request(...request: Parameters<Http2SessionManager["request"]>): ReturnType<Http2SessionManager["request"]> {
    const stream = await super.request(...request);
    this.#watch(stream.session);
    return stream;
  }

  /** Why a call failed with `error`, for a person. */
  reason(error: unknown): string {
    if (this.#latest?.destroyed && !this.#isAnswered) {
      return this.#hasTls
        ? "it does not speak HTTP/2 to this client: does it want another certificate than `tls.cert`?"
        : "it does not speak HTTP/2 to this client: does it want TLS (`tls`), or is this another port than gRPC's?";
    }
    const message = messageOf(error);
    // Node says only that it ended the call itself.
    return this.#latest?.destroyed && /stream closed with error code/.test(message) ? "the connection was closed" : message;
  }

  /** Follows a connection to its end. `opened` is the present one where a call has not named it. */
  #watch(opened: Http2Session | undefined = openedOf(this)): void {
    if (!opened || this.#known.has(opened)) {
      return;
    }
    this.#known.add(opened);
    this.#latest = opened;
    this.#isAnswered = false;
    opened.once("remoteSettings", () => {
      this.#isAnswered ||= this.#latest === opened;
    });
    // connect listens no longer once it has given a connection up. Node may tell of an error after that, when the socket
    // has closed, and would end the process if nobody listened.
    opened.on("error", () => {});
  }
}

/** What `error` says, for a person. */
export function messageOf(error: unknown): string {
  const message = ConnectError.from(error).rawMessage.trim();
  return /wrong version number/i.test(message) ? "it does not speak TLS" : message;
}

/** The connection of `manager` that calls can go on. connect has no public way to it before there is a call. */
function openedOf(manager: Http2SessionManager): Http2Session | undefined {
  const state = manager["s"] as { t: string; conn?: Http2Session };
  return state.t === "ready" ? state.conn : undefined;
}

/** Dials by TLS. Left to itself, Node 18 would send an address as the name of its host, which is not allowed. */
function connector(host: string, port: number, tls: TlsOptions): () => TLSSocket {
  const secureContext = toContext(tls);
  const servername = tls.serverName ?? (isIP(host) ? "" : host);
  return () => connect({ host, port, servername, secureContext, ALPNProtocols: ["h2"] });
}

function toContext({ ca, cert, key }: TlsOptions): SecureContext {
  const files = { ca: toPem(ca, "ca"), cert: toPem(cert, "cert"), key: toPem(key, "key") };
  if ((files.cert === undefined) !== (files.key === undefined)) {
    const missing = files.cert === undefined ? "cert" : "key";
    throw invalidRequest("a certificate and its private key go together", `tls.${missing}`);
  }
  for (const name of ["ca", "cert"] as const) {
    check(name, "is no certificate", () => files[name] !== undefined && new X509Certificate(files[name]!));
  }
  check("key", "is no private key", () => files.key !== undefined && createPrivateKey(files.key));
  if (files.cert && files.key && !new X509Certificate(files.cert).checkPrivateKey(createPrivateKey(files.key))) {
    throw invalidRequest("is not the private key of `tls.cert`", "tls.key");
  }
  const given = Object.entries(files).filter(([, file]) => file !== undefined);
  return createSecureContext(Object.fromEntries(given));
}

/** A file as text. Node takes any text for authorities, and then trusts none. */
function toPem(file: string | Uint8Array | undefined, name: string): string | undefined {
  if (file === undefined) {
    return undefined;
  }
  const pem = typeof file === "string" ? file : Buffer.from(file).toString("latin1");
  if (!pem.includes("-----BEGIN ")) {
    throw invalidRequest("must be the contents of a file in PEM, not its path", `tls.${name}`);
  }
  return pem;
}

function check(name: string, complaint: string, parse: () => unknown): void {
  try {
    parse();
  } catch (error) {
    throw invalidRequest(`${complaint}: ${error instanceof Error ? error.message : String(error)}`, `tls.${name}`);
  }
}

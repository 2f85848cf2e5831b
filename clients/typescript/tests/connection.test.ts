import assert from "node:assert/strict";
import { generateKeyPairSync } from "node:crypto";
import { createServer as createHttpServer } from "node:http";
import { createServer, type AddressInfo, type Server, type Socket } from "node:net";
import { test } from "node:test";

import { Code, FinishReason, QuartetClient, QuartetError, type TlsOptions } from "../src/index.js";
import { cutOffMs } from "../src/router.js";
import { FakeSessions, withRouter } from "./fake-router.js";

const OPTIONS = { timeout: 60_000 };
const PICTURE = new Uint8Array(16 << 20);
const KEY = generateKeyPairSync("ec", { namedCurve: "P-256" }).privateKey.export({ type: "pkcs8", format: "pem" }) as string;
/** Of another key; only its form counts. */
const CERTIFICATE = `-----BEGIN CERTIFICATE-----
MIIBhTCCASugAwIBAgIUcwE+LpddvQecswEBVti9itT9XwEwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMcXVhcnRldCB0ZXN0MCAXDTI2MTEyOTE3MzA1OVoYDzIxMjYx
MTA1MTczMDU5WjAXMRUwEwYDVQQDDAxxdWFydGV0IHRlc3QwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAAQJ/0rcTWFx7btvduXve3muWkZsI/dSp72AZZJ90tbtr3SK
mv9runS7s3kV81ESRFrWmRBbDYj0ZEv33Ic9m0Abo1MwUTAdBgNVHQ4EFgQUKThI
Ihe+pJNjMLyUm6YDV9CqGbQwHwYDVR0jBBgwFoAUKThIIhe+pJNjMLyUm6YDV9Cq
GbQwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiEA4/tTRA6UkOX0
+qWjMugFILwPfV2Ixt4iVKte27PvObICIFKOG1djdE+GDFWIiw4UKn/1yED10CAd
5D69vEgv1UDN
-----END CERTIFICATE-----
`;

/** Runs `test` with the address of what is no router. */
async function withServer(server: Server, test: (address: string) => Promise<void>): Promise<void> {
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  try {
    await test(`127.0.0.1:${(server.address() as AddressInfo).port}`);
  } finally {
    server.close();
  }
}

async function* answer() {
  yield { message: { case: "accepted" as const, value: { requestId: "r" } } };
  yield { message: { case: "finished" as const, value: { reason: FinishReason.LENGTH } } };
}

test("uploads that were dropped leave room for the next request", OPTIONS, async () => {
  let uploads = 0;
  let arrive = (): void => {};
  const generate = async function* (requests: AsyncIterable<unknown>, { signal }: { signal: AbortSignal }) {
    if (uploads++ < 3) {
      arrive();
      await new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve())); // and reads nothing
      return;
    }
    for await (const _ of requests) {
      break;
    }
    yield* answer();
  };
  await withRouter({ generate }, async (client) => {
    for (let count = 0; count < 3; count++) {
      const begun = new Promise<void>((resolve) => (arrive = resolve));
      const aborting = new AbortController();
      const dropped = client.complete("x", { media: [PICTURE], signal: aborting.signal });
      dropped.catch(() => {}); // it is awaited below
      await begun;
      aborting.abort(new Error("dropped"));
      await assert.rejects(dropped, { message: "dropped" });
    }
    await client.complete("x");
  });
});

test("a session's first request may be a long one", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client) => {
    const session = client.session();
    const long = session.generate("x".repeat(12 << 20)).next();
    const router = await sessions.next();
    router.send({ finished: [{ slot: await router.nextStart(), finished: { reason: FinishReason.LENGTH } }] });
    assert.ok(!(await long).done);
    router.end();
  });
});

test("a port that speaks HTTP/1 is named as such, and ends no process", OPTIONS, async () => {
  const server = createHttpServer((_, response) => response.end("hello"));
  await withServer(server, async (address) => {
    const client = new QuartetClient(address);
    try {
      await assert.rejects(client.complete("x"), { reason: "ROUTER_UNAVAILABLE", message: /another port than gRPC's/ });
    } finally {
      client.close();
    }
    // Node tells of the error of a connection once its socket has closed.
    await new Promise<void>((resolve) => server.close(() => resolve()));
    await new Promise<void>((resolve) => setImmediate(resolve));
  });
});

test("a peer that hangs up before it speaks HTTP/2 may want TLS", OPTIONS, async () => {
  const server = createServer((socket) => socket.on("error", () => {}).once("data", () => socket.end()));
  await withServer(server, async (address) => {
    const client = new QuartetClient(address);
    for (const one of [client, client.session()]) {
      await assert.rejects(one.complete("x"), { reason: "ROUTER_UNAVAILABLE", message: /does it want TLS/ });
    }
    client.close();
  });
});

test("a router without TLS is named as such", OPTIONS, async () => {
  await withServer(createHttpServer(), async (address) => {
    const client = new QuartetClient(address, { tls: {} });
    await assert.rejects(client.complete("x"), { message: `no router answers at ${address}: it does not speak TLS` });
    client.close();
  });
});

test("a router that does not answer in time is given up", OPTIONS, async () => {
  const sockets: Socket[] = [];
  const server = createServer((socket) => void sockets.push(socket.on("error", () => {})));
  await withServer(server, async (address) => {
    const client = new QuartetClient(address, { tls: {} }); // which it never answers
    await assert.rejects(client.complete("x"), { message: `no router answers at ${address} within 3 s` });
    client.close();
    sockets.forEach((socket) => socket.destroy());
  });
});

test("a router that dies has closed its connection", OPTIONS, async () => {
  const generate = async function* () {
    yield { message: { case: "accepted" as const, value: {} } };
    await new Promise(() => {});
  };
  await withRouter({ generate }, async (client, breakConnections, address) => {
    const answer = client.generate("x");
    await answer.next();
    breakConnections();
    await assert.rejects(answer.next(), { message: `lost the router at ${address}: the connection was closed` });
  });
});

const BAD_FILES: [TlsOptions, field: string][] = [
  [{ ca: "/etc/ssl/ca.pem" }, "tls.ca"],
  [{ ca: "" }, "tls.ca"],
  [{ ca: new Uint8Array(8) }, "tls.ca"],
  [{ ca: KEY }, "tls.ca"],
  [{ cert: "cert.pem", key: KEY }, "tls.cert"],
  [{ cert: KEY, key: KEY }, "tls.cert"],
  [{ cert: CERTIFICATE }, "tls.key"],
  [{ key: KEY }, "tls.cert"],
  [{ cert: CERTIFICATE, key: CERTIFICATE }, "tls.key"],
  [{ cert: CERTIFICATE, key: KEY.replace(/\n.{8}/, "\nAAAAAAAA") }, "tls.key"],
  [{ cert: CERTIFICATE, key: KEY }, "tls.key"], // of another certificate
];

for (const [index, [tls, field]] of BAD_FILES.entries()) {
  test(`a client with bad files for TLS is not made: ${field}, ${index}`, () => {
    assert.throws(() => new QuartetClient("127.0.0.1:1", { tls }), (error) => {
      assert.ok(error instanceof QuartetError);
      assert.deepEqual([error.code, error.reason, error.field], [Code.InvalidArgument, "INVALID_FIELD", field]);
      return true;
    });
  });
}

test("authorities may have text around them, and be bytes", () => {
  const ca = `Some authority\n${CERTIFICATE}`;
  new QuartetClient("127.0.0.1:1", { tls: { ca } }).close();
  new QuartetClient("127.0.0.1:1", { tls: { ca: Buffer.from(ca) } }).close();
});

test("a request is cut off somewhat after its timeout, in whole milliseconds that a timer takes", () => {
  assert.equal(cutOffMs(1), 2_001);
  assert.equal(cutOffMs(10_000.3333), 12_001);
  assert.equal(cutOffMs(30 * 24 * 3_600_000), 2 ** 31 - 1);
});

for (const timeoutMs of [10_000.3333, 30 * 24 * 3_600_000]) {
  test(`a timeout of ${timeoutMs} ms is one`, OPTIONS, async () => {
    const sessions = new FakeSessions();
    await withRouter({ generate: answer, session: sessions.method }, async (client) => {
      await client.complete("x", { timeoutMs });
      const waiting = client.session().generate("x", { timeoutMs }).next();
      const router = await sessions.next();
      router.send({ finished: [{ slot: await router.nextStart(), finished: { reason: FinishReason.LENGTH } }] });
      assert.ok(!(await waiting).done);
    });
  });
}

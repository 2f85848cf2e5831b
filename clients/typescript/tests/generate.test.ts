import assert from "node:assert/strict";
import { test } from "node:test";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import type { GenerateResponseSchema } from "../src/gen/quartet/v1/router_pb.js";
import { Code, FinishReason, QuartetClient, QuartetError } from "../src/index.js";
import { FakeSessions, withRouter } from "./fake-router.js";

const OPTIONS = { timeout: 60_000 };
type Response = MessageInitShape<typeof GenerateResponseSchema>;
const ACCEPTED: Response = { message: { case: "accepted", value: { requestId: "r" } } };
const FINISHED: Response = { message: { case: "finished", value: { reason: FinishReason.LENGTH } } };

function delta(offset: number, text: string): Response {
  return { message: { case: "delta", value: { tokenOffset: offset, tokenIds: [offset], text } } };
}

test("a status brings Quartet's reason, the field and when to try again", OPTIONS, async () => {
  const generate = async function* () {
    yield* [];
    throw new ConnectError("no room", Code.ResourceExhausted, undefined, [
      { desc: ErrorInfoSchema, value: { reason: "QUEUE_FULL", domain: "quartet" } },
      { desc: BadRequestSchema, value: { fieldViolations: [{ field: "model" }] } },
      { desc: RetryInfoSchema, value: { retryDelay: { seconds: 2n } } },
    ]);
  };
  await withRouter({ generate }, async (client) => {
    await assert.rejects(client.complete("x"), (error) => {
      assert.ok(error instanceof QuartetError);
      assert.deepEqual(
        [error.code, error.reason, error.message, error.field, error.retryAfterMs],
        [Code.ResourceExhausted, "QUEUE_FULL", "no room", "model", 2000],
      );
      return true;
    });
  });
});

test("an answer without its end, or with a hole, is no answer", OPTIONS, async () => {
  const generate = async function* () {
    yield* [ACCEPTED, delta(0, "a")];
  };
  await withRouter({ generate }, (client) => assert.rejects(client.complete("x"), { reason: "PROTOCOL_VIOLATION" }));
  const holed = async function* () {
    yield* [ACCEPTED, delta(0, "a"), delta(2, "c"), FINISHED];
  };
  await withRouter({ generate: holed }, (client) =>
    assert.rejects(client.complete("x"), { message: "tokens before number 2 of the answer are missing" }),
  );
});

test("a connection that breaks is a router that was lost", OPTIONS, async () => {
  const generate = async function* () {
    yield ACCEPTED;
    await new Promise(() => {});
  };
  await withRouter({ generate }, async (client, breakConnections) => {
    const answer = client.generate("x");
    await answer.next();
    breakConnections();
    await assert.rejects(answer.next(), { reason: "ROUTER_UNAVAILABLE", code: Code.Unavailable });
  });
});

test("closing the client ends what runs", OPTIONS, async () => {
  const generate = async function* () {
    yield ACCEPTED;
    await new Promise(() => {});
  };
  await withRouter({ generate }, async (client) => {
    const answer = client.generate("x");
    await answer.next();
    client.close();
    await assert.rejects(answer.next(), { message: "the client was closed" });
  });
});

test("an abort throws its reason and ends the call at the router", OPTIONS, async () => {
  let ended = (): void => {};
  const atRouter = new Promise<void>((resolve) => (ended = resolve));
  const generate = async function* (_: unknown, { signal }: { signal: AbortSignal }) {
    signal.addEventListener("abort", () => ended());
    yield ACCEPTED;
    await atRouter;
  };
  await withRouter({ generate }, async (client) => {
    const aborting = new AbortController();
    const answer = client.generate("x", { signal: aborting.signal });
    await answer.next();
    const waiting = answer.next();
    aborting.abort(new Error("changed my mind"));
    await assert.rejects(waiting, { message: "changed my mind" });
    await atRouter;
  });
});

test("nothing is sent for a signal that has aborted", OPTIONS, async () => {
  const generate = async function* () {
    yield* [];
    assert.fail("it was sent");
  };
  await withRouter({ generate }, async (client) => {
    const signal = AbortSignal.abort(new Error("too late"));
    await assert.rejects(client.complete("x", { signal }), { message: "too late" });
  });
});

test("leaving a waiting answer ends it at once", OPTIONS, async () => {
  const generate = async function* () {
    yield ACCEPTED;
    await new Promise(() => {});
  };
  await withRouter({ generate }, async (client) => {
    const answer = client.generate("x");
    await answer.next();
    const waiting = answer.next();
    assert.ok((await answer.return()).done);
    assert.ok((await waiting).done);
  });
});

test("a router that does not end a request at its timeout is cut off", OPTIONS, async () => {
  const generate = async function* () {
    yield ACCEPTED;
    await new Promise(() => {});
  };
  await withRouter({ generate, session: new FakeSessions().method }, async (client) => {
    const late = { code: Code.DeadlineExceeded, reason: "TIMEOUT" };
    await Promise.all(
      [client, client.session()].map((one) => assert.rejects(one.complete("x", { timeoutMs: 1 }), late)),
    );
  });
});

test("a cancel goes up behind the start, once", OPTIONS, async () => {
  const messages: (string | undefined)[] = [];
  const generate = async function* (requests: AsyncIterable<{ message: { case: string | undefined } }>) {
    for await (const { message } of requests) {
      messages.push(message.case);
    }
    yield* [ACCEPTED, FINISHED];
  };
  await withRouter({ generate }, async (client) => {
    const answer = client.generate("x");
    answer.cancel();
    answer.cancel();
    const parts = [];
    for await (const part of answer) {
      parts.push(part.case);
    }
    assert.deepEqual(parts, ["accepted", "finished"]);
    assert.deepEqual(messages, ["start", "cancel"]);
  });
});

test("the trace context is metadata of the call", OPTIONS, async () => {
  let traceparent: string | null = null;
  const generate = async function* (_: unknown, { requestHeader }: { requestHeader: Headers }) {
    traceparent = requestHeader.get("traceparent");
    yield* [ACCEPTED, FINISHED];
  };
  await withRouter({ generate }, async (client) => {
    await client.complete("x", { traceparent: "00-aa-bb-01" });
    assert.equal(traceparent, "00-aa-bb-01");
  });
});

test("where no router answers, the error names the address", OPTIONS, async () => {
  const client = new QuartetClient("127.0.0.1:1");
  await assert.rejects(client.complete("x"), (error) => {
    assert.ok(error instanceof QuartetError);
    assert.equal(error.reason, "ROUTER_UNAVAILABLE");
    assert.match(error.message, /^no router answers at 127\.0\.0\.1:1: /);
    return true;
  });
  client.close();
  await assert.rejects(client.complete("x"), { message: "the client was closed" });
});

test("an address is host:port", () => {
  for (const address of ["", "host", "host:0", "host:70000", "::1:50050", "http://host:1", "a/b:1"]) {
    assert.throws(() => new QuartetClient(address), { field: "address" }, address);
  }
  for (const address of ["host:50050", "[::1]:50050"]) {
    new QuartetClient(address).close();
  }
});

import assert from "node:assert/strict";
import { test } from "node:test";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { ConnectError } from "@connectrpc/connect";

import { ErrorInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import type { GenerateResponseSchema } from "../src/gen/quartet/v1/router_pb.js";
import { Code, FinishReason, QuartetError, type AnswerPart, type AnswerStream } from "../src/index.js";
import { Router } from "../src/router.js";
import { Session } from "../src/session.js";
import { FakeSessions, withRouter, type FakeSession } from "./fake-router.js";

const OPTIONS = { timeout: 60_000 };

/** A request that the router has got: its answer, the first part of that, and its slot. */
type Opened = [answer: AnswerStream, first: Promise<AnswerPart>, slot: number];

/** Runs `test` with a way to send a request and, once one was sent, with the router's end of the session. */
async function withSession(
  test: (open: (prompt: string) => Promise<Opened>, router: () => FakeSession) => Promise<void>,
): Promise<void> {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client) => {
    const session = client.session();
    let router: FakeSession | undefined;
    const open = async (prompt: string): Promise<Opened> => {
      const answer = session.generate(prompt);
      const first = answer.next().then(valueOf);
      first.catch(() => {}); // some tests don't await it
      router ??= await sessions.next();
      return [answer, first, await router.nextStart()];
    };
    await test(open, () => router ?? assert.fail("nothing was sent"));
    router?.end();
  });
}

function valueOf(result: IteratorResult<AnswerPart, void>): AnswerPart {
  assert.ok(!result.done, "the answer has ended");
  return result.value;
}

function tokens(slot: number, offset: number, ids: number[], text: string): Parameters<FakeSession["send"]>[0] {
  return { slots: [slot], numTokens: [ids.length], tokenOffsets: [offset], tokenIds: ids, texts: [text] };
}

function finished(slot: number): Parameters<FakeSession["send"]>[0] {
  return { finished: [{ slot, finished: { reason: FinishReason.LENGTH } }] };
}

test("columns are taken apart, each to its request", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [, first, one] = await open("one");
    const [, second, two] = await open("two");
    assert.notEqual(one, two);
    router().send({ slots: [two, one], numTokens: [2, 1], tokenOffsets: [0, 0], tokenIds: [7, 8, 9], texts: ["b", "a"] });
    const [a, b] = await Promise.all([first, second]);
    assert.ok(a.case === "delta" && b.case === "delta");
    assert.deepEqual([a.value.text, a.value.tokenIds, b.value.text, b.value.tokenIds], ["a", [9], "b", [7, 8]]);
  });
});

test("what a slow reader has not read becomes one delta", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [slow, first, one] = await open("slow");
    const [, other, two] = await open("other");
    router().send(tokens(one, 0, [1], "a"));
    await first;
    for (const [offset, text] of [..."bcd"].entries()) {
      router().send(tokens(one, offset + 1, [offset + 2], text));
    }
    router().send(finished(one));
    router().send(tokens(two, 0, [1], "x")); // once it has come, all before it has
    await other;
    const merged = valueOf(await slow.next());
    assert.ok(merged.case === "delta");
    assert.deepEqual([merged.value.tokenOffset, merged.value.tokenIds, merged.value.text], [1, [2, 3, 4], "bcd"]);
    assert.equal(valueOf(await slow.next()).case, "finished");
    assert.ok((await slow.next()).done);
  });
});

test("a reader who leaves too much unread loses that request, and no other", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [slow, first, one] = await open("slow");
    const [other, otherFirst, two] = await open("other");
    router().send(tokens(one, 0, [1], "a"));
    await first;
    router().send(tokens(one, 1, [2], "b".repeat(65_534))); // fits
    router().send(tokens(one, 2, [3], ""));
    router().send(tokens(one, 3, [4], ""));
    const message = await router().next();
    assert.ok(message?.case === "cancel" && message.value.slot === one);
    await assert.rejects(slow.next(), { reason: "STREAM_STALLED", code: Code.Aborted });
    router().send(tokens(two, 0, [1], "x"));
    await otherFirst;
    router().send({ failures: [{ slot: one, failure: { code: Code.Canceled, reason: "CANCELLED" } }] });
    router().send(finished(two));
    assert.equal(valueOf(await other.next()).case, "finished");
  });
});

test("a failure ends one request and says which field and when to try again", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [, first, one] = await open("one");
    const [, second, two] = await open("two");
    const failure = {
      code: Code.ResourceExhausted,
      reason: "QUEUE_FULL",
      message: "no room",
      field: "model",
      retryDelay: { seconds: 1n, nanos: 500_000_000 },
    };
    router().send({ failures: [{ slot: one, failure }] });
    await assert.rejects(first, (error) => {
      assert.ok(error instanceof QuartetError);
      assert.deepEqual(
        [error.code, error.reason, error.message, error.field, error.retryAfterMs],
        [Code.ResourceExhausted, "QUEUE_FULL", "no room", "model", 1500],
      );
      return true;
    });
    router().send(tokens(two, 0, [1], "x"));
    await second;
  });
});

test("a slot is used again once its request has ended", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [, first, one] = await open("one");
    const [leaving, , two] = await open("two");
    void leaving.return();
    const cancel = await router().next();
    assert.ok(cancel?.case === "cancel" && cancel.value.slot === two);
    const [, , three] = await open("three");
    assert.notEqual(three, two, "the router has not said yet that it ended");
    router().send(finished(one));
    assert.equal((await first).case, "finished");
    const [, , four] = await open("four");
    assert.equal(four, one);
  });
});

test("a break fails what has begun, and sends what has not again on another stream", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client, breakConnections) => {
    const session = client.session();
    const begun = session.generate("one");
    const first = begun.next();
    const broken = await sessions.next();
    broken.send(tokens(await broken.nextStart(), 0, [1], "x"));
    await first;
    const waiting = session.generate("two").next();
    await broken.nextStart();
    breakConnections();
    await assert.rejects(begun.next(), { reason: "ROUTER_UNAVAILABLE", code: Code.Unavailable });
    const router = await sessions.next();
    router.send(tokens(await router.nextStart(), 0, [2], "y"));
    const part = valueOf(await waiting);
    assert.ok(part.case === "delta" && part.value.text === "y");
    router.end();
  });
});

test("a request is sent again only once", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client, breakConnections) => {
    const waiting = client.session().generate("one").next();
    waiting.catch(() => {}); // it is awaited below
    for (let count = 0; count < 2; count++) {
      await (await sessions.next()).nextStart();
      breakConnections();
    }
    await assert.rejects(waiting, { reason: "ROUTER_UNAVAILABLE" });
  });
});

test("an idle stream is half-closed, and the next request opens another", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (_client, _breakConnections, address) => {
    const connection = new Router(address);
    const session = new Session(connection, () => {}, 1);
    for (const prompt of ["one", "two"]) {
      const answer = session.generate(prompt).next();
      const router = await sessions.next();
      router.send(finished(await router.nextStart()));
      assert.equal(valueOf(await answer).case, "finished");
      assert.equal(await router.next(), undefined);
      router.end();
    }
    connection.close();
  });
});

test("nonsense of the router ends the session", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [, first, slot] = await open("one");
    router().send({ slots: [slot], numTokens: [2], tokenIds: [1], texts: ["a"] });
    router().send(tokens(slot + 1, 0, [1], "x"));
    assert.equal(await router().next(), undefined);
    await assert.rejects(first, { reason: "PROTOCOL_VIOLATION" });
  });
});

test("closing a session ends its requests, and it takes no more", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client) => {
    const session = client.session();
    const running = session.generate("one").next();
    const router = await sessions.next();
    await router.nextStart();
    session.close();
    await assert.rejects(running, { message: "the session was closed" });
    await assert.rejects(session.generate("two").next(), { message: "the session was closed" });
    router.end();
  });
});

test("each request has its own trace context", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client) => {
    const answer = client.session().generate("one", { traceparent: "00-aa-bb-01" });
    void answer.next().catch(() => {});
    const router = await sessions.next();
    const message = await router.next();
    assert.ok(message?.case === "start");
    assert.equal(message.value.traceparent, "00-aa-bb-01");
    router.end();
  });
});

function status(reason: string): ConnectError {
  const details = [{ desc: ErrorInfoSchema, value: { reason, domain: "quartet" } }];
  return new ConnectError("no more", Code.Unavailable, undefined, details);
}

for (const reason of ["SESSION_IDLE", "DRAINING"]) {
  test(`a request that meets the end of a stream is sent again: ${reason}`, OPTIONS, async () => {
    const sessions = new FakeSessions();
    await withRouter({ session: sessions.method }, async (client) => {
      const waiting = client.session().generate("one").next();
      const ended = await sessions.next();
      await ended.nextStart();
      ended.end(status(reason));
      const router = await sessions.next();
      router.send(finished(await router.nextStart()));
      assert.equal(valueOf(await waiting).case, "finished");
      router.end();
    });
  });
}

test("a request that has begun, or failed for another reason, is not sent again", OPTIONS, async () => {
  for (const [hasBegun, reason] of [[true, "DRAINING"], [false, "QUEUE_FULL"]] as const) {
    const sessions = new FakeSessions();
    await withRouter({ session: sessions.method }, async (client) => {
      const answer = client.session().generate("one");
      let next = answer.next();
      const router = await sessions.next();
      const slot = await router.nextStart();
      if (hasBegun) {
        router.send({ accepted: [{ slot, accepted: {} }] });
        await next;
        next = answer.next();
      }
      router.end(status(reason));
      await assert.rejects(next, { reason });
    });
  }
});

test("a cancel that comes before the start goes up behind it", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client) => {
    const answer = client.session().generate("one");
    answer.cancel();
    const first = answer.next();
    const router = await sessions.next();
    const slot = await router.nextStart();
    const cancel = await router.next();
    assert.ok(cancel?.case === "cancel" && cancel.value.slot === slot);
    router.send(finished(slot));
    assert.equal(valueOf(await first).case, "finished");
    router.end();
  });
});

test("a late cancel does not reach the next request in its slot", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [ended, first, one] = await open("one");
    router().send(finished(one));
    await first;
    const [, , two] = await open("two");
    assert.equal(two, one);
    ended.cancel();
    await open("three"); // fails if a cancel comes first
  });
});

test("a request that is dropped while the client connects is not sent", OPTIONS, async () => {
  const sessions = new FakeSessions();
  let numGenerated = 0;
  const generate = async function* (): AsyncGenerator<MessageInitShape<typeof GenerateResponseSchema>> {
    numGenerated++;
    yield { message: { case: "accepted", value: { requestId: "r" } } };
    yield { message: { case: "finished", value: { reason: FinishReason.LENGTH } } };
  };
  await withRouter({ generate, session: sessions.method }, async (client) => {
    const session = client.session();
    for (const one of [client, session]) {
      const aborting = new AbortController();
      const dropped = one.generate("dropped", { signal: aborting.signal }).next();
      aborting.abort(new Error("no longer"));
      await assert.rejects(dropped, { message: "no longer" });
    }
    await client.complete("sent");
    assert.equal(numGenerated, 1);
    const sent = session.generate("sent").next();
    const router = await sessions.next();
    const message = await router.next();
    assert.ok(message?.case === "start");
    assert.deepEqual(message.value.start?.prompt, { case: "text", value: "sent" });
    router.send(finished(message.value.slot));
    await sent;
    router.end();
  });
});

test("log probabilities are those of their choice", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [answer, first, slot] = await open("one");
    router().send({
      slots: [slot, slot],
      choices: [0, 1],
      numTokens: [1, 1],
      tokenOffsets: [0, 0],
      tokenIds: [7, 8],
      texts: ["a", "b"],
      logprobs: [{ slot, choice: 1, tokens: [{ logprob: -0.5 }] }],
    });
    const parts = [await first, valueOf(await answer.next())];
    const numbers = parts.map((part) => part.case === "delta" && [part.value.choice, part.value.logprobs.length]);
    assert.deepEqual(numbers, [[0, 0], [1, 1]]);
  });
});

test("calls and reasoning that wait for a slow reader are kept", OPTIONS, async () => {
  await withSession(async (open, router) => {
    const [slow, first, one] = await open("slow");
    const [, other, two] = await open("other");
    router().send(tokens(one, 0, [1], "a"));
    await first;
    router().send({ parsed: [{ slot: one, reasoning: "so ", toolCalls: [{ index: 0, name: "add" }] }] });
    router().send({ parsed: [{ slot: one, reasoning: "what", toolCalls: [{ index: 0, arguments: "{}" }] }] });
    router().send(tokens(two, 0, [1], "x")); // once it has come, all before it has
    await other;
    const part = valueOf(await slow.next());
    assert.ok(part.case === "delta");
    assert.equal(part.value.reasoning, "so what");
    assert.deepEqual(part.value.toolCalls.map((call) => call.name + call.arguments), ["add", "{}"]);
  });
});

test("a stream that is used again is no longer idle", OPTIONS, async ({ mock }) => {
  const idleTimeoutMs = 1_234_567;
  const set = mock.method(globalThis, "setTimeout");
  const clear = mock.method(globalThis, "clearTimeout");
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (_client, _breakConnections, address) => {
    const connection = new Router(address);
    const session = new Session(connection, () => {}, idleTimeoutMs);
    const first = session.generate("one").next();
    const router = await sessions.next();
    router.send(finished(await router.nextStart()));
    await first;
    const idle = set.mock.calls.find((call) => call.arguments[1] === idleTimeoutMs)?.result;
    assert.ok(idle);
    session.generate("two").next().catch(() => {});
    await router.nextStart();
    assert.ok(clear.mock.calls.some((call) => call.arguments[0] === idle));
    session.close();
    connection.close();
    router.end();
  });
});

test("closing the client closes its sessions", OPTIONS, async () => {
  const sessions = new FakeSessions();
  await withRouter({ session: sessions.method }, async (client) => {
    const running = client.session().generate("one");
    const first = running.next();
    const router = await sessions.next();
    router.send(tokens(await router.nextStart(), 0, [1], "x"));
    await first;
    client.close();
    await assert.rejects(running.next(), { message: "the session was closed" });
    router.end();
  });
});

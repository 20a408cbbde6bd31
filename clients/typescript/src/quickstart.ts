// Lists sessions, begins a turn, and follows it on a watch.
//
//   npm run quickstart -- 127.0.0.1:7400
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";

import { Code, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { ErrorInfoSchema, SessionService, TurnOutcome } from "./index.js";

const target = process.argv[2] ?? "127.0.0.1:7400";
const sessionId = process.argv[3] ?? "quickstart-typescript";

// With TLS, set CA, and for mTLS CERT and KEY, to PEM files; TOKEN is a bearer token,
// TENANT whom a gateway or an operator acts for.
const { CA, CERT, KEY, TENANT, TOKEN } = process.env;
const authorize: Interceptor = (next) => (request) => {
  if (TOKEN) request.header.set("authorization", `Bearer ${TOKEN}`);
  if (TENANT) request.header.set("kvshuttle-tenant", TENANT);
  return next(request);
};
const transport = createGrpcTransport({
  baseUrl: `${CA ? "https" : "http"}://${target}`,
  interceptors: [authorize],
  // Every call has a deadline; a watch has none.
  defaultTimeoutMs: 5_000,
  nodeOptions: CA
    ? {
        ca: readFileSync(CA),
        ...(CERT && KEY ? { cert: readFileSync(CERT), key: readFileSync(KEY) } : {}),
      }
    : {},
});
const sessions = createClient(SessionService, transport);

let pageToken = "";
let known = 0;
do {
  const page = await sessions.listSessions({ pageSize: 100, pageToken });
  known += page.sessions.length;
  pageToken = page.nextPageToken;
} while (pageToken !== "");
console.log(`${known} sessions are known`);

// A refusal says why, and what to do.
try {
  await sessions.getSession({ sessionId: "nobody" });
} catch (error) {
  const refused = ConnectError.from(error);
  if (refused.code !== Code.NotFound) throw refused;
  const [info] = refused.findDetails(ErrorInfoSchema);
  console.log(`refused: ${info?.reason}`);
}

// The watch is there before the turn: what it tells first is the state, then every change.
const stop = new AbortController();
const watch = sessions.watchSessions({ sessionId }, { signal: stop.signal, timeoutMs: 0 });
let begun = false;
try {
  for await (const piece of watch) {
    if (piece.event.case === "snapshot" && piece.event.value.complete && !begun) {
      begun = true;
      // The request id makes it safe to send this again.
      const answer = await sessions.beginTurn({ sessionId, requestId: randomUUID() });
      const turn = answer.turn!;
      console.log(`turn ${turn.turn} runs on ${turn.decode?.url} (${turn.plan?.reason})`);
      await sessions.endTurn({
        sessionId,
        turn: turn.turn,
        turnToken: answer.turnToken,
        outcome: TurnOutcome.COMPLETED,
        requestId: randomUUID(),
      });
    } else if (piece.event.case === "changed") {
      const last = piece.event.value.turns.at(-1);
      if (last?.outcome !== TurnOutcome.COMPLETED) continue;
      console.log(`watched: turn ${last.turn} of ${piece.event.value.sessionId} has ended`);
      break;
    }
  }
} finally {
  stop.abort();
}
await sessions.endSession({ sessionId, requestId: randomUUID() });
console.log("session over");

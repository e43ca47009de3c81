// Ask one turn and print its reply, with a Redis client, RFC 8785 and docs/protocol.md alone.
// Environment: REDIS_SOCKET, TURNMILL_NAMESPACE. Arguments: the model, and the turn's other fields as JSON.
import { createHash } from "node:crypto";
import { inflateSync } from "node:zlib";
import canonicalize from "canonicalize";
import { commandOptions, createClient } from "redis";

const [model, fields] = process.argv.slice(2);
const N = `${process.env.TURNMILL_NAMESPACE}:`;
const Q = `${N}q:${model}:`;
const db = createClient({ socket: { path: process.env.REDIS_SOCKET } });
await db.connect();

const body = canonicalize({ v: 1, model, sample: 0, ...JSON.parse(fields) });
const hash = createHash("sha256").update(body).digest("hex");
const script = await db.hGet(`${N}scripts`, "enqueue"); // put there by the farm's workers
const enqueue = await db.scriptLoad(script);

// Where to read on in the stream, and how the turn stands.
const ask = (flags) =>
  db.evalSha(enqueue, { keys: [N, Q], arguments: ["node", "5", "1", "0", hash, flags, body] });

let [position, state] = await ask("f"); // f: afresh
while (state === "queued" || state === "running") {
  const heard = await db.xRead({ key: `${Q}finished`, id: position }, { BLOCK: 5000, COUNT: 1000 });
  const entries = heard?.[0].messages ?? [];
  if (entries.length > 0) position = entries.at(-1).id;
  if (entries.length === 0 || entries.some((entry) => entry.message.h === hash)) [, state] = await ask("");
}

let record = await db.get(commandOptions({ returnBuffers: true }), `${N}r:${hash}`);
if (record?.[0] === "Z".charCodeAt(0)) record = inflateSync(record.subarray(1));
console.log(JSON.stringify({ hash, state, reply: record && JSON.parse(record.toString()) }));
await db.quit();

// What the client makes of errors. `node refusals.mjs` writes `refusals.json`.
import { writeFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI();
const say = (content, model = "sim") => ({ model, messages: [{ role: "user", content }] });

async function refused(asking) {
  try {
    await asking;
  } catch (error) {
    return [error.constructor.name, error.code];
  }
  return null;
}

async function answered(content, asked) {
  const response = await asked.chat.completions.create(say(content));
  return response.choices[0].message.content;
}

const narrow = new OpenAI({ apiKey: process.env.NARROW_API_KEY });
const hasty = new OpenAI({ timeout: 2000 });
const stranger = new OpenAI({ apiKey: `${process.env.OPENAI_API_KEY}x` });
writeFileSync(
  "refusals.json",
  JSON.stringify({
    busy: await Promise.all(["one", "two"].map((content) => answered(content, narrow))),
    late: await answered("late", hasty),
    long: await refused(client.chat.completions.create(say("long ".repeat(1000)))),
    model: await refused(client.chat.completions.create(say("Hello", "nobody"))),
    key: await refused(stranger.chat.completions.create(say("Hello"))),
  }),
);

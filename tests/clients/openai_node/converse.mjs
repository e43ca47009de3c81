// Conversations over OpenAI's own client for Node: chat, stream, tools, tools in streams. `node converse.mjs COUNT` writes
// `said.json`.
import { writeFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI();
const model = "sim";

async function chat(number) {
  const messages = [{ role: "developer", content: "Be brief." }];
  const said = [];
  for (const turn of ["first", "second"]) {
    messages.push({ role: "user", content: `chat ${number}, ${turn}` });
    const response = await client.chat.completions.create({ model, messages, max_completion_tokens: 100 });
    const [choice] = response.choices;
    if (choice.finish_reason !== "stop" || !response.usage.total_tokens) throw new Error(JSON.stringify(response));
    messages.push(choice.message);
    said.push(choice.message.content);
  }
  return said;
}

async function stream(number) {
  const chunks = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: [{ type: "text", text: `stream ${number}` }] }],
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage;
  for await (const chunk of chunks) {
    if (chunk.choices.length) text += chunk.choices[0].delta.content ?? "";
    else usage = chunk.usage;
  }
  return [text, usage.completion_tokens];
}

/** The client's own loop, which calls the tools that the model asks for. */
async function tools(number, options) {
  const asked = [];
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: `${options.stream ? "streamed " : ""}weather ${number}` }],
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: "The weather in a city",
          parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
          parse: JSON.parse,
          function: ({ city }) => {
            asked.push(city);
            return `It rains in ${city}`;
          },
        },
      },
    ],
    ...options,
  });
  const content = await runner.finalContent();
  return [...asked, content];
}

const names = [];
for await (const one of client.models.list()) names.push(one.id);
if (!names.includes(model)) throw new Error(`there is no ${model}: ${names}`);
const asked = [];
for (let number = 0; number < Number(process.argv[2]); number++) {
  asked.push(chat(number), stream(number), tools(number, {}), tools(number, { stream: true }));
}
writeFileSync("said.json", JSON.stringify(await Promise.all(asked)));

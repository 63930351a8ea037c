// Render /openapi.json: the calls, their parameters and their answers.
import { get } from "./calls.js";

function made(tag, text, ...children) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  element.append(...children);
  return element;
}

const plain = (text) => text.replaceAll("`", "");

const schemaOf = (api, schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema);

function typeOf(api, schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1).replace(/^_/, "");
  if (schema.anyOf) {
    const types = schema.anyOf.map((one) => typeOf(api, one));
    return types.filter((one) => one !== "null").join(" or ");
  }
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(api, schema.items)}`;
  if (schema.additionalProperties) return `object of ${typeOf(api, schema.additionalProperties)}`;
  return schema.type ?? "";
}

function table(heads, rows) {
  const head = made("tr", "", ...heads.map((text) => made("th", text)));
  const body = rows.map(([name, ...cells]) => {
    const texts = cells.map((text) => made("td", text));
    return made("tr", "", made("td", "", made("code", name)), ...texts);
  });
  return made("table", "", made("thead", "", head), made("tbody", "", ...body));
}

function call(api, path, method, one) {
  const title = made("h2", "", Object.assign(made("span", method.toUpperCase()), { className: "method" }), ` ${path}`);
  const section = made("section", "", title, made("p", plain(one.description ?? one.summary)));
  const parameters = one.parameters ?? [];
  const about = (own) => (own.required ? "Required. " : "") + plain(own.description ?? own.schema.description ?? "");
  if (parameters.length) {
    const rows = parameters.map((own) => [own.name, typeOf(api, own.schema), about(own)]);
    section.append(table(["parameter", "type", ""], rows));
  }
  if (one.requestBody) section.append(made("p", `Body: ${Object.keys(one.requestBody.content).join(", ")}`));
  const answer = schemaOf(api, one.responses["200"]?.content?.["application/json"]?.schema);
  if (answer?.properties) {
    const rows = Object.entries(answer.properties).map(([name, own]) => [name, typeOf(api, own), own.description ?? ""]);
    section.append(table(["answer", "type", ""], rows));
  }
  return section;
}

function example(origin) {
  const calls = [
    `curl '${origin}/search?q=a+red+heart&k=5'`,
    `curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' '${origin}/search?of=images'`,
  ];
  return made("section", "", made("h2", "From a terminal"), made("pre", calls.join("\n")));
}

try {
  const api = await get("/openapi.json");
  const failed = 'A request that fails is answered with {"error": "..."} and a status from 400.';
  document.getElementById("about").textContent = `${api.info.description} ${failed} As JSON: /openapi.json`;
  const calls = document.getElementById("calls");
  calls.append(example(location.origin));
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, one] of Object.entries(methods)) calls.append(call(api, path, method, one));
} catch (error) {
  document.getElementById("about").textContent = error.message;
}

// Calls of the service.

export async function get(url, options = {}) {
  let answer;
  try {
    answer = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The service does not answer.");
  }
  const content = await answer.json().catch(() => ({ error: `The service answered with status ${answer.status}.` }));
  if (!answer.ok) throw new Error(content.error);
  return content;
}

export const pictureUrl = (id, revision) => `/pictures/${encodeURIComponent(id)}?v=${revision}`;

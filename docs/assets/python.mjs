// A worker that runs Python: it loads Pyodide from the site's own files, and checks exercises by in_page.py. A loop that
// never ends stops nothing but this worker, which the page then ends.
//
//   in    {source, exercise}: what somebody wrote, and the address of the exercise
//   out   {loaded: true} once; then {outcome} for each, or {failed} if Python or a file could not be loaded

import { loadPyodide } from "./pyodide/pyodide.mjs"

const text = async (address) => {
  const answer = await fetch(address)
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`)
  return answer.text()
}

async function load() {
  const [python, check] = await Promise.all([loadPyodide(), text(new URL("exercises/in_page.py", import.meta.url))])
  python.FS.writeFile("in_page.py", check)
  const { run } = python.pyimport("in_page")
  postMessage({ loaded: true })
  return run
}

const loading = load()

addEventListener("message", async ({ data }) => {
  try {
    const [run, exercise] = await Promise.all([loading, text(data.exercise)])
    postMessage({ outcome: JSON.parse(run(data.source, exercise)) })
  } catch (error) {
    postMessage({ failed: String(error) })
  }
})

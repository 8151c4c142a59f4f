// How the pages here and docs/ladder/sm.md make elements.

"use strict"

/** Make an element: `on...` are listeners, a null or false attribute is left out, children are elements or text. */
var el = (() => {
  const SVG = "http://www.w3.org/2000/svg"
  const SHAPES = new Set(["svg", "g", "rect", "path", "text", "title", "circle", "line"])

  return (name, attributes = {}, ...children) => {
    const node = SHAPES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name)
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value)
      else if (value !== null && value !== false) node.setAttribute(key, value)
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null))
    return node
  }
})()

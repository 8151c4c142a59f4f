// What predictions and exercises share: elements, and what a reader did, remembered in this browser.

"use strict"

const reader = {
  /** Return what was remembered under a name, as an object. */
  recall(name) {
    try {
      return JSON.parse(localStorage.getItem(`twinattn.${name}`)) ?? {}
    } catch {
      return {} // a browser that keeps nothing for a file, or something else under this name
    }
  },

  remember(name, all) {
    try {
      localStorage.setItem(`twinattn.${name}`, JSON.stringify(all))
    } catch {} // then it is forgotten with the page
  },

  element(name, attributes = {}, ...children) {
    const made = Object.assign(document.createElement(name), attributes)
    made.append(...children)
    return made
  },
}

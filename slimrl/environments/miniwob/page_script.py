"""JavaScript that runs in a page: fixed texts, whose arguments are plain values."""

COUNT_TIMERS = """
(() => {
  const set = window.setTimeout, clear = window.clearTimeout, pending = new Set();
  window.setTimeout = (work, delay = 0, ...more) => {
    const id = set(() => { pending.delete(id); work(...more); }, delay);
    if (delay <= 1000) pending.add(id);
    return id;
  };
  window.clearTimeout = (id) => { pending.delete(id); clear(id); };
  window.slimrlTimers = () => pending.size;
})();
"""
"""Before a page's own scripts: counts the timers that are due within a second, so that one can wait for them instead of
for a time."""

STOP_ANIMATIONS = "() => { if (window.jQuery) jQuery.fx.off = true; }"

IS_SETTLED = "() => slimrlTimers() === 0"

STATE = """
() => {
  const left = new Set(['bid', 'value', 'checked', 'aria-roledescription', 'aria-description']);
  const describe = (node) => {
    if (node instanceof Text) return JSON.stringify(node.data);
    if (!(node instanceof Element) || node.tagName === 'SCRIPT' || node.tagName === 'STYLE') return '';
    const attributes = Array.from(node.attributes)
      .filter((one) => !left.has(one.name) && !one.name.startsWith('browsergym_'))
      .map((one) => one.name + '=' + JSON.stringify(one.value)).sort();
    const live = [node.value, node.checked, node.selected, node.scrollTop || 0, node === document.activeElement]
      .map((one) => (['string', 'number', 'boolean'].includes(typeof one) ? JSON.stringify(one) : ''));
    return '<' + [node.tagName, ...attributes, ...live].join(' ') + '>' +
      Array.from(node.childNodes, describe).join('') + '</>';
  };
  return describe(document.body);
}
"""
"""All that the document says, with what users change in it, and without what reading a page adds to it"""

HINTS = """
() => Object.fromEntries(Array.from(document.querySelectorAll('[bid]'), (one) => [
  one.getAttribute('bid'),
  one.id || one.getAttribute('class') || (one.getAttribute('src') || '').split('/').pop().split('.')[0] || '',
]))
"""
"""Identifier, class or image of each element: what there is to say of one without a text"""

LISTS = """
() => Object.fromEntries(Array.from(document.querySelectorAll('select[bid]'), (one) => [
  one.getAttribute('bid'), Array.from(one.options, (option) => option.label),
]))
"""
"""The options of each list"""

OPTIONS = "(one) => (one instanceof HTMLSelectElement ? Array.from(one.options, (option) => option.label) : null)"

IS_FIELD = """
(one) => one.isContentEditable || one instanceof HTMLTextAreaElement ||
  (one instanceof HTMLInputElement && !['button', 'checkbox', 'file', 'image', 'radio', 'reset', 'submit']
    .includes(one.type))
"""

SCROLL = """
(one, pixels) => {
  const scrolls = (node) => node.scrollHeight > node.clientHeight && getComputedStyle(node).overflowY !== 'visible';
  while (one.parentElement && !scrolls(one)) one = one.parentElement;
  one.scrollBy(0, pixels);
}
"""
"""Scrolls the element, or what it is in"""

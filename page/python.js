// What Python's operators and builtins do, where JavaScript's do something else. The translated
// functions call these. A tuple or a list is an Array; a dict is a Dict, whose keys may be tuples.

class Dict {
  constructor(pairs, missing) {
    this.pairs = new Map();
    this.missing = missing;
    for (const [key, value] of pairs) this.set(key, value);
  }
  // tuples are equal where their elements are
  static key(key) {
    return Array.isArray(key) ? JSON.stringify(key) : key;
  }
  has(key) {
    return this.pairs.has(Dict.key(key));
  }
  get(key, missing = null) {
    const pair = this.pairs.get(Dict.key(key));
    return pair === undefined ? missing : pair[1];
  }
  set(key, value) {
    this.pairs.set(Dict.key(key), [key, value]);
  }
  items() {
    return [...this.pairs.values()];
  }
  values() {
    return this.items().map((pair) => pair[1]);
  }
  [Symbol.iterator]() {
    return this.items().map((pair) => pair[0])[Symbol.iterator]();
  }
}

const py = {
  // --- exceptions
  ValueError: class {
    constructor(...args) {
      this.args = args;
    }
    __str__() {
      return String(this.args[0]);
    }
  },
  fail(message) {
    throw new Error(message);
  },

  // --- operators
  truth(x) {
    if (Array.isArray(x)) return x.length > 0;
    return x instanceof Dict ? x.pairs.size > 0 : Boolean(x);
  },
  or: (x, other) => (py.truth(x) ? x : other()),
  and: (x, other) => (py.truth(x) ? other() : x),
  add(x, y) {
    if (Array.isArray(x) && Array.isArray(y)) return [...x, ...y];
    return typeof x === typeof y && !Array.isArray(x) ? x + y : py.fail("TypeError: +");
  },
  // x += y, which changes a list in place
  grow(x, y) {
    if (!Array.isArray(x)) return py.add(x, y);
    for (const item of y) x.push(item);
    return x;
  },
  mul(x, y) {
    if (typeof x === "number" && typeof y === "number") return x * y;
    if (!Array.isArray(x) || typeof y !== "number") py.fail("TypeError: *");
    return Array.from({ length: Math.max(0, y) * x.length }, (_, i) => x[i % x.length]);
  },
  div: (x, y) => (y === 0 ? py.fail("ZeroDivisionError") : x / y),
  // rounds down, and exactly: x - mod is a multiple of y
  floordiv: (x, y) => (x - py.mod(x, y)) / y,
  // has the sign of y
  mod(x, y) {
    if (y === 0) py.fail("ZeroDivisionError");
    const rest = x % y;
    return rest !== 0 && rest < 0 !== y < 0 ? rest + y : rest;
  },
  equal: (x, y) => (Array.isArray(x) ? JSON.stringify(x) === JSON.stringify(y) : x === y),
  in(x, list) {
    if (list instanceof Dict) return list.has(x);
    return typeof list === "string" ? list.includes(x) : list.some((item) => py.equal(item, x));
  },
  at(x, i) {
    if (x instanceof Dict) {
      const pair = x.pairs.get(Dict.key(i));
      if (pair !== undefined) return pair[1];
      if (x.missing === undefined) py.fail(`KeyError: ${i}`);
      x.set(i, x.missing());
      return x.get(i);
    }
    const item = x[i < 0 ? i + x.length : i];
    return item === undefined ? py.fail(`IndexError: ${i}`) : item;
  },
  put(x, i, value) {
    if (x instanceof Dict) return x.set(i, value);
    py.at(x, i);
    x[i < 0 ? i + x.length : i] = value;
  },
  slice(x, start, stop, step = 1) {
    if (!(step > 0)) py.fail(`a slice with step ${step}`);
    const part = x.slice(start ?? 0, stop ?? x.length);
    return step === 1 ? part : part.filter((_, i) => i % step === 0);
  },
  unpack(x, n) {
    const items = [...x];
    return items.length === n ? items : py.fail(`ValueError: ${items.length} values, not ${n}`);
  },
  getattr(x, name, missing) {
    if (name in x) return x[name];
    return missing === undefined ? py.fail(`AttributeError: ${name}`) : missing;
  },

  // --- builtins
  len: (x) => (x instanceof Dict ? x.pairs.size : x.length),
  list: (x) => [...x],
  int: (x) => Math.trunc(x),
  abs: (x) => Math.abs(x),
  all(x) {
    for (const item of x) if (!py.truth(item)) return false;
    return true;
  },
  any(x) {
    for (const item of x) if (py.truth(item)) return true;
    return false;
  },
  sum: (x, start = 0) => [...x].reduce((a, b) => py.add(a, b), start),
  max: (...x) => py.best(x, (a, b) => a > b),
  min: (...x) => py.best(x, (a, b) => a < b),
  best(x, better) {
    const [first, ...rest] = x.length === 1 ? x[0] : x;
    if (first === undefined) py.fail("ValueError: of an empty list");
    return rest.reduce((a, b) => (better(b, a) ? b : a), first);
  },
  next(x, missing) {
    for (const item of x) return item;
    return missing === undefined ? py.fail("StopIteration") : missing;
  },
  range(...bounds) {
    const [start, stop, step] = bounds.length === 1 ? [0, bounds[0], 1] : [...bounds, 1];
    const length = Math.max(0, Math.ceil((stop - start) / step));
    return Array.from({ length }, (_, i) => start + i * step);
  },
  enumerate: (x, start = 0) => Array.from(x, (item, i) => [start + i, item]),
  zip(...x) {
    const lists = x.map((items) => [...items]);
    const length = Math.min(...lists.map((items) => items.length));
    return Array.from({ length }, (_, i) => lists.map((items) => items[i]));
  },
  // by numbers, or by tuples of numbers; equal ones keep their order
  sorted(x, key = (item) => item) {
    const keys = [...x].map((item) => [[key(item)].flat(), item]);
    const differs = ([a], [b]) => a.map((_, i) => a[i] - b[i]).find((d) => d !== 0) ?? 0;
    return keys.sort(differs).map(([, item]) => item);
  },
  gcd(...numbers) {
    const two = (a, b) => (b === 0 ? Math.abs(a) : two(b, a % b));
    return numbers.reduce((a, b) => two(a, b), 0);
  },

  // --- text and objects
  str(x) {
    if (x === null) return "None";
    if (typeof x === "boolean") return x ? "True" : "False";
    if (x.__str__) return x.__str__();
    return Array.isArray(x) ? `[${x.map(py.str).join(", ")}]` : String(x);
  },
  // "{name} is" with a Dict of names
  format(text, names) {
    const value = (name) => py.str(py.at(names, name));
    return text.replace(/\{(\w+)\}|[{}]/g, (part, name) => (name ? value(name) : py.fail(part)));
  },
  replace: (text, old, now) => text.replaceAll(old, () => now),
  index(list, x) {
    const i = list.findIndex((item) => py.equal(item, x));
    return i < 0 ? py.fail("ValueError: not in list") : i;
  },
  merge: (...dicts) => new Dict(dicts.flatMap((d) => d.items())),
  // a named tuple with other values in some fields
  replaced(tuple, changes) {
    const fields = tuple.constructor.fields;
    return new tuple.constructor(...fields.map((name, i) => changes[name] ?? tuple[i]));
  },
};

//! How Python writes values: `str`, `repr` and `json.dumps`.
//!
//! Chat templates were written against Jinja2, where printing a value is Python's `str` and the `tojson` filter is
//! `json.dumps(value, ensure_ascii=False)`. A model has seen exactly those bytes in training, so these three follow
//! Python to the byte: `True` and `None`, `1e+20`, single quotes unless the text holds one, key order kept, no HTML
//! escapes.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::limits;
use crate::text::disarm::MARK;

/// Python's `str(value)`: what `{{ value }}` prints. Undefined prints nothing.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut out = String::new();
            write_repr(&mut out, value, 0)?;
            Ok(out)
        }
    }
}

/// Refuses to print what nests too deep or has become too long.
fn check(out: &str, depth: usize) -> Result<(), Error> {
    if depth > limits::DEPTH {
        return Err(bad(format!("a value is nested more than {} deep", limits::DEPTH)));
    }
    if out.len() > limits::TEXT {
        return Err(bad(format!("a value prints as more than {} bytes", limits::TEXT)));
    }
    Ok(())
}

/// Appends Python's `repr(value)`.
fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    check(out, depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value, ["nan", "inf", "-inf"]),
        ValueKind::String => write_repr_str(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ")") } else { ('[', "]") };
            out.push(open);
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &item, depth + 1)?;
                count += 1;
            }
            // Python writes a tuple of one as `(x,)`.
            if value.is_tuple() && count == 1 {
                out.push(',');
            }
            out.push_str(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Quotes as `repr` does: single quotes, unless the text holds a single quote and no double quote.
fn write_repr_str(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) => {
                out.push_str(&format!("\\x{:02x}", c as u32))
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Appends an integer, or a float as Python's `repr` writes it; `names` are its words for NaN and the infinities.
fn write_number(out: &mut String, value: &Value, names: [&str; 3]) {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => write_float(out, float, names),
        _ => out.push_str(&value.to_string()),
    }
}

/// Shortest digits that read back as the same value; an exponent from 1e16 up and below 1e-4.
fn write_float(out: &mut String, x: f64, [nan, inf, minus_inf]: [&str; 3]) {
    if x.is_nan() {
        return out.push_str(nan);
    }
    if x.is_infinite() {
        return out.push_str(if x > 0.0 { inf } else { minus_inf });
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        out.push_str(&format!("{digits}e{sign}{:02}", exponent.abs()));
    }
}

/// The `join` filter: items are written as `str` writes them. `attribute` may be a path with dots.
pub(super) fn join(
    value: &Value,
    joiner: Option<&Value>,
    attribute: Option<&str>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let joiner = match joiner {
        Some(joiner) => str(joiner)?,
        None => kwargs.get::<Option<&Value>>("d")?.map(str).transpose()?.unwrap_or_default(),
    };
    let attribute = match attribute {
        Some(attribute) => Some(attribute),
        None => kwargs.get::<Option<&str>>("attribute")?,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (index, mut item) in value.try_iter()?.enumerate() {
        for name in attribute.into_iter().flat_map(|path| path.split('.')) {
            item = item.get_attr(name)?;
        }
        if index > 0 {
            out.push_str(&joiner);
        }
        out.push_str(&str(&item)?);
        check(&out, 0)?;
    }
    Ok(out)
}

/// The `tojson` filter as Hugging Face defines it over `json.dumps`: `ensure_ascii` (default false), `indent`,
/// `separators`, `sort_keys`, in this order or by name. Any other keyword is an error, as in Python.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if args.len() > NAMES.len() {
        return Err(bad(format!("tojson takes at most {} arguments, {} given", NAMES.len(), args.len())));
    }
    let mut given: [Option<Value>; 4] = Default::default();
    for (slot, name) in given.iter_mut().zip(NAMES) {
        *slot = kwargs.get::<Option<Value>>(name)?;
    }
    kwargs.assert_all_used()?;
    for (slot, arg) in given.iter_mut().zip(args.0) {
        *slot = Some(arg);
    }
    let [ensure_ascii, indent, separators, sort_keys] =
        given.map(|arg| arg.filter(|value| !value.is_none() && !value.is_undefined()));

    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            // A negative indent is none, but lines still break; no template wants more than 64.
            None => Some(" ".repeat(i64::try_from(indent)?.clamp(0, 64) as usize)),
        },
    };
    let (item, key) = match separators {
        None => (if indent.is_some() { ",".to_owned() } else { ", ".to_owned() }, ": ".to_owned()),
        Some(pair) => {
            let parts = pair.try_iter()?.map(|part| str(&part)).collect::<Result<Vec<String>, _>>()?;
            let [item, key] = <[String; 2]>::try_from(parts)
                .map_err(|parts| bad(format!("tojson: separators has {} parts, 2 wanted", parts.len())))?;
            (item, key)
        }
    };
    let style = Json {
        ensure_ascii: ensure_ascii.is_some_and(|value| value.is_true()),
        sort_keys: sort_keys.is_some_and(|value| value.is_true()),
        indent,
        item,
        key,
    };
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out)
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// One `json.dumps` call's settings.
struct Json {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Json {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        check(out, depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value, ["NaN", "Infinity", "-Infinity"]),
            ValueKind::String => self.write_str(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let mut empty = true;
                for item in value.try_iter()? {
                    self.open_item(out, '[', &mut empty, depth);
                    self.write(out, &item, depth + 1)?;
                }
                self.close(out, '[', ']', empty, depth);
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort_by_cached_key(|key| str(key).unwrap_or_default());
                }
                let mut empty = true;
                for name in keys {
                    self.open_item(out, '{', &mut empty, depth);
                    match name.kind() {
                        ValueKind::String => self.write_str(out, name.as_str().unwrap_or_default()),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            out.push('"');
                            self.write(out, &name, depth + 1)?;
                            out.push('"');
                        }
                        kind => return Err(bad(format!("tojson: a {kind} cannot be a key"))),
                    }
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(&name)?, depth + 1)?;
                }
                self.close(out, '{', '}', empty, depth);
            }
            kind => return Err(bad(format!("tojson: a value of kind {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn open_item(&self, out: &mut String, bracket: char, empty: &mut bool, depth: usize) {
        if *empty {
            out.push(bracket);
        } else {
            out.push_str(&self.item);
        }
        *empty = false;
        self.new_line(out, depth + 1);
    }

    fn close(&self, out: &mut String, open: char, close: char, empty: bool, depth: usize) {
        if empty {
            out.push(open);
        } else {
            self.new_line(out, depth);
        }
        out.push(close);
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_str(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
                // The mark is no text of the user's: it must reach the tokenizer as it is.
                c if self.ensure_ascii && c > '~' && c != MARK => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::template::disarm;
    use serde_json::json;

    fn value_of(json: &serde_json::Value) -> Value {
        disarm(&Default::default(), json)
    }

    /// (JSON value, Python's `str` of it); the second column is what CPython 3.11 prints.
    #[test]
    fn prints_as_python_does() {
        for (value, want) in [
            (json!(null), "None"),
            (json!(true), "True"),
            (json!(7), "7"),
            (json!(-0.0), "-0.0"),
            (json!(1.0), "1.0"),
            (json!(0.1), "0.1"),
            (json!(1e15), "1000000000000000.0"),
            (json!(1e16), "1e+16"),
            (json!(1.5e20), "1.5e+20"),
            (json!(0.0001), "0.0001"),
            (json!(0.00001), "1e-05"),
            (json!(1e-300), "1e-300"),
            (json!(u64::MAX), "18446744073709551615"),
            (json!("it's"), "it's"),
            (json!(["it's", "a\"b", "both'\"", "x"]), r#"["it's", 'a"b', 'both\'"', 'x']"#),
            (
                json!({"z": 1, "a": [null, true], "é": "\n\\\u{7f}"}),
                r"{'z': 1, 'a': [None, True], 'é': '\n\\\x7f'}",
            ),
        ] {
            assert_eq!(str(&value_of(&value)).unwrap(), want, "{value}");
        }
    }

    #[test]
    fn tuples_print_with_round_brackets() {
        for (source, want) in [
            ("{{ (1, 'a') }}", "(1, 'a')"),
            ("{{ (1,) }}", "(1,)"),
            ("{{ {'a': 1}.items() | list }}", "[('a', 1)]"),
        ] {
            let mut env = minijinja::Environment::new();
            env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
            env.set_formatter(|out, _, value| Ok(out.write_str(&str(value)?)?));
            assert_eq!(env.render_str(source, ()).unwrap(), want, "{source}");
        }
    }

    /// huggingface/transformers#31100, sgl-project/sglang#13722, google/minja#84, huggingface/swift-jinja#72: (expression
    /// over `v`, what Hugging Face's filter gives).
    #[test]
    fn transformers_31100_json_is_the_bytes_of_json_dumps() {
        let v = json!({"z": "a<b>&'c'", "a": "x/y", "m": {"s": "é😀", "f": [1.0, 1e20, true, null], "e": [], "o": {}}});
        let mut env = minijinja::Environment::new();
        env.add_filter("tojson", tojson);
        for (source, want) in [
            (
                "{{ v | tojson }}",
                r#"{"z": "a<b>&'c'", "a": "x/y", "m": {"s": "é😀", "f": [1.0, 1e+20, true, null], "e": [], "o": {}}}"#,
            ),
            ("{{ v.m.s | tojson(ensure_ascii=true) }}", r#""\u00e9\ud83d\ude00""#),
            ("{{ v.m.s | tojson(true) }}", r#""\u00e9\ud83d\ude00""#),
            (
                "{{ v.m | tojson(indent=2) }}",
                "{\n  \"s\": \"é😀\",\n  \"f\": [\n    1.0,\n    1e+20,\n    true,\n    null\n  ],\n  \"e\": [],\n  \"o\": {}\n}",
            ),
            ("{{ v.m.f | tojson(separators=(',', ':')) }}", "[1.0,1e+20,true,null]"),
            ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", r#"{"a": 2, "b": 1}"#),
            ("{{ 'tab\t\"q\" \\\\ \u{1}' | tojson }}", r#""tab\t\"q\" \\ \u0001""#),
        ] {
            assert_eq!(
                env.render_str(source, minijinja::context! { v => value_of(&v) }).unwrap(),
                want,
                "{source}"
            );
        }
        assert!(env.render_str("{{ v | tojson(colour=1) }}", ()).is_err());
        assert!(env.render_str("{{ missing | tojson }}", ()).is_err());
    }
}

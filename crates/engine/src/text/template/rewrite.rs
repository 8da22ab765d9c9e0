//! Templates are rewritten before they are compiled where the engine's own operators do something else than Python's and
//! cannot be changed:
//!
//! - `a ~ b` becomes `python_join(a, b)`: both are written as Python writes them (`1e+20`, `{'a': True}`).
//! - `for x in xs` goes over `python_iter(xs)`: none is an error, not an empty list.
//! - `a + b` becomes `python_add(a, b)`, in templates with the filter `safe` alone: what is added to a safe string is
//!   escaped as HTML and the sum is safe again (`markupsafe.Markup`). Some templates were trained with what comes of it.
//! - `{% generation %}` and `{% endgeneration %}`, which mark assistant text for training, become a condition that always
//!   holds, so that white space around them is trimmed as around any other tag.
//!
//! Lines stay where they are, so that errors name the right one.

use std::borrow::Cow;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, State};

use super::python;

const JOIN: &str = "python_join";
const ITER: &str = "python_iter";
const ADD: &str = "python_add";

/// Adds the functions that rewritten templates call.
pub(super) fn add_functions(env: &mut Environment<'_>) {
    env.add_function(JOIN, |left: &Value, right: &Value| -> Result<String, Error> {
        Ok(python::str(left)? + &python::str(right)?)
    });
    env.add_function(ITER, |value: Value| {
        if value.is_none() {
            return Err(Error::new(ErrorKind::InvalidOperation, "'NoneType' object is not iterable"));
        }
        Ok(value)
    });
    env.add_function(ADD, add);
}

/// `left + right`, with Python's rule for safe strings.
fn add(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    match (left.as_str(), right.as_str()) {
        (Some(a), Some(b)) if left.is_safe() || right.is_safe() => {
            let part =
                |value: &Value, text| if value.is_safe() { Cow::Borrowed(text) } else { escaped(text) };
            Ok(Value::from_safe_string(format!("{}{}", part(left, a), part(right, b))))
        }
        _ => state.env().compile_expression("left + right")?.eval(minijinja::context! { left, right }),
    }
}

/// `text` as HTML, by the replacements of `markupsafe.escape`.
fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(['&', '<', '>', '\'', '"']) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + text.len() / 4);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// The template that is compiled for `source`.
pub(super) fn rewritten(source: &str) -> String {
    let uses_safe = source.split('|').skip(1).any(|after| {
        let after = after.trim_start().strip_prefix("safe");
        after.is_some_and(|rest| !rest.starts_with(is_word))
    });
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let (close, skipped) = match tag.as_bytes().get(1) {
            Some(b'{') => ("}}", 2),
            Some(b'%') => ("%}", 2),
            Some(b'#') => ("#}", tag.find("#}").map_or(tag.len(), |end| end + 2)),
            _ => ("", 1),
        };
        out.push_str(&tag[..skipped]);
        rest = &tag[skipped..];
        if !matches!(close, "}}" | "%}") {
            continue;
        }
        let inner = rest.trim_start_matches(['-', '+']);
        out.push_str(&rest[..rest.len() - inner.len()]);
        let mut scanner = Scanner { rest: inner, uses_safe };
        if close == "}}" {
            scanner.expressions(close, &mut out);
            rest = scanner.rest;
            continue;
        }
        let name = inner.trim_start();
        let name = &name[..name.find(|c| !is_word(c)).unwrap_or(name.len())];
        match name {
            "generation" | "endgeneration" => {
                out.push_str(if name == "generation" { " if true " } else { " endif " });
                scanner.rest = &inner.trim_start()[name.len()..];
                scanner.expressions(close, &mut out);
            }
            "raw" => {
                let end = inner.find("endraw").unwrap_or(inner.len());
                out.push_str(scanner.take(end));
            }
            _ => scanner.expressions(close, &mut out),
        }
        rest = scanner.rest;
    }
    out.push_str(rest);
    out
}

/// Words after which a new expression starts. (`is` is none: a test binds tighter than a sum.)
const KEYWORDS: [&str; 11] =
    ["and", "or", "not", "in", "if", "elif", "else", "for", "set", "filter", "recursive"];

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '.'
}

struct Scanner<'s> {
    rest: &'s str,
    uses_safe: bool,
}

impl<'s> Scanner<'s> {
    /// Rewrites everything up to and including `close`, a bracket or the end of a tag.
    fn expressions(&mut self, close: &str, out: &mut String) {
        let is_tag = close.len() == 2;
        let mut operand = Operand::default();
        // In a `for` tag: its iterable is awaited, or starts at this offset of `out`.
        let (mut is_loop, mut iterable) = (false, None);
        let mut last = "";
        while !self.rest.is_empty() {
            let tail =
                if is_tag { self.rest.strip_prefix(['-', '+']).unwrap_or(self.rest) } else { self.rest };
            let ends = self.rest.starts_with(close) || tail.starts_with(close);
            let token = if ends { "" } else { self.token() };
            if ends || matches!(token, "if" | "recursive") {
                operand.finish(out);
                if let Some(start) = iterable.take() {
                    out.insert_str(start, &format!(" {ITER}(("));
                    out.push_str("))");
                }
            }
            if ends {
                let before =
                    self.rest.len() - if self.rest.starts_with(close) { self.rest.len() } else { tail.len() };
                out.push_str(self.take(before + close.len()));
                return;
            }
            match token {
                "(" | "[" | "{" => {
                    operand.text.push_str(token);
                    let close = if token == "(" {
                        ")"
                    } else if token == "[" {
                        "]"
                    } else {
                        "}"
                    };
                    self.expressions(close, &mut operand.text);
                }
                "~" => operand.join(),
                "+" | "-" if operand.is_term() => operand.add(token, self.uses_safe),
                "," | ":" | "=" | "==" | "!=" | "<" | ">" | "<=" | ">=" => {
                    operand.finish(out);
                    out.push_str(token);
                }
                _ if KEYWORDS.contains(&token) && last != "is" => {
                    operand.finish(out);
                    out.push_str(token);
                    is_loop |= is_tag && token == "for";
                    if is_loop && token == "in" {
                        (is_loop, iterable) = (false, Some(out.len()));
                    }
                }
                _ => operand.text.push_str(token),
            }
            if !token.trim().is_empty() && (token, last) != ("not", "is") {
                last = token;
            }
        }
        operand.finish(out);
    }

    /// The next token: white space, a string, a word or number, or an operator.
    fn token(&mut self) -> &'s str {
        let first = self.rest.chars().next().unwrap_or(' ');
        let end = match first {
            '\'' | '"' => {
                let mut escaped = false;
                let end = self.rest[1..].find(|c| {
                    let ends = c == first && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                });
                end.map(|end| end + 2)
            }
            c if c.is_whitespace() => self.rest.find(|c: char| !c.is_whitespace()),
            c if is_word(c) => self.rest.find(|c| !is_word(c)),
            '=' | '!' | '<' | '>' if self.rest[1..].starts_with('=') => Some(2),
            c => Some(c.len_utf8()),
        };
        self.take(end.unwrap_or(self.rest.len()))
    }

    fn take(&mut self, end: usize) -> &'s str {
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }
}

/// An expression without comparisons and logic, as far as it was read: sums of joins of terms.
#[derive(Default)]
struct Operand {
    /// Left of a `+` that is rewritten.
    sum: Option<String>,
    /// Terms with the signs after them that stay as they are.
    before: String,
    /// Left of a `~`.
    joined: Option<String>,
    /// The term that is being read.
    text: String,
}

impl Operand {
    /// Whether there is a term to add to; a sign after `*` and the like belongs to what follows.
    fn is_term(&self) -> bool {
        !matches!(self.text.trim_end().chars().next_back(), None | Some('*' | '/' | '%'))
    }

    fn join(&mut self) {
        self.end_join();
        self.joined = Some(std::mem::take(&mut self.text));
    }

    fn add(&mut self, sign: &str, rewrites: bool) {
        self.end_sum();
        if rewrites && sign == "+" {
            self.sum = Some(std::mem::take(&mut self.text));
        } else {
            self.before = std::mem::take(&mut self.text) + sign;
        }
    }

    fn end_join(&mut self) {
        if let Some(left) = self.joined.take() {
            self.text = format!(" {JOIN}({left},{})", self.text);
        }
    }

    /// Makes what was read one term.
    fn end_sum(&mut self) {
        self.end_join();
        self.text.insert_str(0, &std::mem::take(&mut self.before));
        if let Some(left) = self.sum.take() {
            self.text = format!(" {ADD}({left},{})", self.text);
        }
    }

    fn finish(&mut self, out: &mut String) {
        self.end_sum();
        out.push_str(&std::mem::take(&mut self.text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (source, the same without white space and with `@`, `~` and `*` for the calls that add, join and iterate).
    #[test]
    fn operators_become_calls() {
        for (source, want) in [
            ("{{ a + b - c }}", "{{ a + b - c }}"),
            ("{{ a ~ b ~ c }}", "{{ ~(~(a, b), c) }}"),
            ("{{ a + b ~ c * 2 + d }}", "{{ a + ~(b, c * 2) + d }}"),
            ("{{ a * -1 ~ b }}", "{{ ~(a * -1, b) }}"),
            ("{{ a|safe + b }} + {{ c }}", "{{ @(a|safe, b) }} + {{ c }}"),
            ("{{ a|safe + b + c ~ d }}", "{{ @(@(a|safe, b), ~(c, d)) }}"),
            ("{%- set x = (a + '+\\'' + b)|safe -%}", "{%- set x = (@(@(a, '+\\''), b))|safe -%}"),
            ("{{ -1|safe }}{{ +1 - 2 + 3 }}", "{{ -1|safe }}{{ @(+1 - 2, 3) }}"),
            ("{{ f(a ~ 1, x=b ~ 2)[c ~ d:] }}", "{{ f(~(a, 1), x=~(b, 2))[~(c, d):] }}"),
            ("{% if a ~ b == c and d is not in e ~ f %}", "{% if ~(a, b) == c and ~(d is not in e, f) %}"),
            (
                "{# a ~ b #}{ a ~ b }{% raw %}{{ a ~ b }}{% endraw %}",
                "{# a ~ b #}{ a ~ b }{% raw %}{{ a ~ b }}{% endraw %}",
            ),
            ("{{ {'k': a ~ b}['k'] }}", "{{ {'k': ~(a, b)}['k'] }}"),
            ("{%- for k, v in a ~ b if k in v -%}", "{%- for k, v in *((~(a, b))) if k in v -%}"),
            ("{% for x in [y for y in z] recursive %}", "{% for x in *(([y for y in z])) recursive %}"),
            ("{% for x in 1, 2 %}{% if x in y %}", "{% for x in *((1, 2)) %}{% if x in y %}"),
            ("{%- generation -%} a {% endgeneration %}", "{%- if true -%} a {% endif %}"),
            ("{{ a ~ b", "{{ ~(a, b)"),
            ("{% for x in y", "{% for x in y"),
            ("{{ 'é", "{{ 'é"),
        ] {
            let squeezed = |text: &str| {
                let short = text.replace(ADD, "@").replace(JOIN, "~").replace(ITER, "*");
                short.replace(char::is_whitespace, "")
            };
            assert_eq!(squeezed(&rewritten(source)), squeezed(want), "{source}");
            assert_eq!(rewritten(source).matches('\n').count(), source.matches('\n').count());
        }
    }

    /// (template, what Jinja2 3.1.6 with MarkupSafe 3 prints).
    #[test]
    fn calls_do_what_python_does() {
        for (source, want) in [
            ("{{ 'a<b'|safe + '<c>' }}", "a<b&lt;c&gt;"),
            ("{{ '<c>' + 'a<b'|safe }}", "&lt;c&gt;a<b"),
            ("{{ '<'|safe + \"&'\" + '>'|safe + '\"' }}", "<&amp;&#39;>&#34;"),
            ("{{ '<'|safe ~ '<' }}{{ '<' + '<' }}", "<<<<"),
            ("{{ 1 + 2 }}{{ ([1] + [2])|length }}{{ ''|safe }}", "32"),
            ("{% set x = '<'|safe %}{% set y = x + '<' %}{{ y + '>' }}", "<&lt;&gt;"),
            ("{{ '<'|safe\n  + '<' if true else '' }}", "<&lt;"),
            ("{{ 'a' ~ 1e20 ~ true ~ none ~ {'k': [1.0]} }}", "a1e+20TrueNone{'k': [1.0]}"),
            ("{% for x in missing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ] {
            let mut env = Environment::new();
            env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
            add_functions(&mut env);
            assert_eq!(env.render_str(&rewritten(source), ()).unwrap(), want, "{source}");
        }
    }
}

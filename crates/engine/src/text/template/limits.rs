//! Bounds on what a template may do. A template comes with a downloaded file and is a program: it can loop for ever, double
//! a text until memory ends, or nest lists until a stack does.
//!
//! A source is compiled by recursion over its expressions, so its length bounds the stack that it needs, and is itself
//! bounded.
//!
//! Instructions and the sizes of most values are paid from a budget that grows with the conversation, which stops all but
//! two kinds of harm in the same place on every machine. Deeply nested values are walked by recursion, so a template has
//! a thread with a stack for as deep a value as the budget can buy. Comparing or joining lists that hold one another many
//! times takes exponential time inside one instruction; nothing can stop that thread, so its caller goes on without it, and
//! the template is not run again.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use minijinja::value::Value;
use minijinja::{Error, ErrorKind, State};
use serde_json::Value as Json;

use thiserror::Error as ThisError;

use super::Conversation;

/// Units that a short conversation may spend; public templates need 300 to 1,000 for four messages.
pub(super) const BASE: u64 = 250_000;
/// The most that any conversation may spend: less than half a second, and 256 MiB of values.
const MOST: u64 = 4_000_000;
/// Code that is not optimized takes more stack.
const STACK_FACTOR: u64 = if cfg!(debug_assertions) { 4 } else { 1 };
/// Stack for each unit: one unit nests a value one deeper, and to compare one level takes half of this.
const STACK_PER_UNIT: u64 = 256 * STACK_FACTOR;
/// Stack for each byte of a source: two bytes (`()`, `|e`) nest an expression one deeper, and to compile one level takes a
/// third of what they give.
const STACK_PER_BYTE: u64 = 512 * STACK_FACTOR;
/// Stack for all that does not nest.
const STACK_LEAST: u64 = 1 << 20;
/// Most bytes of a source; public templates have up to 30,000.
const SOURCE: usize = 256 << 10;
/// How long a caller waits: ten times what [`MOST`] takes.
const WAIT: Duration = Duration::from_secs(5);
/// How deep a printed value may nest; what comes from JSON ends at 128.
pub(super) const DEPTH: usize = 200;
/// The longest text that one value may print as, in bytes.
pub(super) const TEXT: usize = 8 << 20;
/// The widest field that a format string may ask for, in characters.
const WIDTH: usize = 9999;

/// Units for this conversation. Some templates look at all messages for each message, and at texts several times.
pub(super) fn budget(conversation: &Conversation) -> u64 {
    let messages = conversation.messages.len() as u64;
    let tools = conversation.tools.iter().flatten();
    let bytes: u64 = conversation.messages.iter().chain(tools).map(size).sum();
    BASE.saturating_add(messages.saturating_mul(messages).saturating_add(bytes).saturating_mul(4)).min(MOST)
}

/// Bytes of a value's texts, and some for each value.
fn size(value: &Json) -> u64 {
    16 + match value {
        Json::String(text) => text.len() as u64,
        Json::Array(items) => items.iter().map(size).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() as u64 + size(value)).sum(),
        _ => 0,
    }
}

/// Why work on its own thread gave nothing.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub(super) enum Broken {
    #[error("it did not end within {} s", WAIT.as_secs())]
    Late,
    #[error("it broke the template engine")]
    Panicked,
    #[error("no thread with {stack_bytes} bytes of stack: {reason}")]
    Thread { stack_bytes: usize, reason: String },
}

/// Bytes of stack to compile `source` with.
///
/// # Errors
/// It is too long.
pub(super) fn compile_stack(source: &str) -> Result<usize, String> {
    match source.len() {
        bytes if bytes > SOURCE => Err(format!("it has {bytes} bytes, and {SOURCE} are the most")),
        bytes => Ok((STACK_LEAST + bytes as u64 * STACK_PER_BYTE) as usize),
    }
}

/// Bytes of stack to run a template with that spends at most `budget`.
pub(super) fn run_stack(budget: u64) -> usize {
    (STACK_LEAST + budget * STACK_PER_UNIT) as usize
}

/// Runs `work` on a thread with so much stack.
///
/// # Errors
/// It did not end in time, it panicked, or there was no thread.
pub(super) fn within<T: Send + 'static>(
    stack_bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Broken> {
    let (send, receive) = channel();
    let spawned = thread::Builder::new().name("template".into()).stack_size(stack_bytes).spawn(move || {
        let _ = send.send(work());
    });
    spawned.map_err(|error| Broken::Thread { stack_bytes, reason: error.to_string() })?;
    receive.recv_timeout(WAIT).map_err(|error| match error {
        RecvTimeoutError::Timeout => Broken::Late,
        RecvTimeoutError::Disconnected => Broken::Panicked,
    })
}

/// Python's methods of strings, lists and dicts. A format string that asks for a wide field is refused: its padding is
/// made before anything is paid.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if name == "format" && value.as_str().is_some_and(|text| widest(text) > WIDTH) {
        let what = format!("format: a field is wider than {WIDTH} characters");
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// The largest number in a format string.
fn widest(text: &str) -> usize {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::{ChatTemplate, Conversation, TemplateError};
    use super::*;
    use crate::text::disarm::Guard;
    use serde_json::json;

    fn failure(source: &str) -> String {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let conversation = Conversation::new(vec![json!({"role": "user", "content": "hi"})]);
        match template.render(&conversation, &Guard::default()) {
            Err(TemplateError::Render { reason, .. }) => reason,
            other => panic!("{source}: {other:?}"),
        }
    }

    #[test]
    fn templates_that_do_not_end_or_grow_without_end_fail_at_once() {
        for source in [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
            "{{ 'a' | indent(999999999999) }}",
            "{% set x = 'ab' * 1000000 %}{{ x.replace('a', x) }}",
            "{{ '%99999999999d' | format(1) }}",
        ] {
            assert!(failure(source).contains("out of fuel"), "{source}: {}", failure(source));
        }
        let recursion = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
        assert!(failure(recursion).contains("recursion"), "{}", failure(recursion));
        let wide = failure("{{ '{0:>99999999999}'.format(1) }}");
        assert!(wide.contains("wider than 9999"), "{wide}");
    }

    #[test]
    fn values_nested_as_deep_as_the_budget_allows_end_in_an_error_or_text() {
        let nest = |inner: &str, end: &str| {
            format!(
                "{{% set ns = namespace(x=[], y=[]) %}}{{% for i in range(99999) %}}{{% set ns.x = {inner} %}}{{% set \
                 ns.y = ns.x %}}{{% endfor %}}{end}"
            )
        };
        let deep = "[[[[[[[[[[ns.x]]]]]]]]]]";
        for end in ["", "{{ ns.x }}", "{{ ns.x == ns.y }}", "{{ ns.x ~ '' }}"] {
            assert!(failure(&nest(deep, end)).contains("out of fuel"));
        }
        let shallow =
            "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}";
        for end in ["{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | string }}"] {
            assert!(failure(&format!("{shallow}{end}")).contains("nested more than 200 deep"));
        }
        let template = ChatTemplate::new(&format!("{shallow}{{{{ ns.x == [] }}}}"), "", "").unwrap();
        let text = template.render(&Conversation::new(Vec::new()), &Guard::default()).unwrap().text();
        assert_eq!(text, "False");
    }

    #[test]
    fn values_that_are_as_deep_and_not_the_same_are_compared() {
        let nest = "{% for i in range(5000) %}{% set ns.x = [[[[[[[[[[ns.x]]]]]]]]]] %}{% set ns.y = [[[[[[[[[[ns.y]]]]]]]]]] \
                    %}{% endfor %}";
        for (end, want) in
            [("ns.x == ns.y", "True"), ("ns.x < ns.y", "False"), ("[ns.x, ns.y] | unique | length", "1")]
        {
            let source = format!("{{% set ns = namespace(x=[], y=[]) %}}{nest}{{{{ {end} }}}}");
            let template = ChatTemplate::new(&source, "", "").unwrap();
            let text = template.render(&Conversation::new(Vec::new()), &Guard::default()).unwrap().text();
            assert_eq!(text, want, "{end}");
        }
    }

    #[test]
    fn a_source_nested_as_deep_as_its_length_allows_compiles_and_a_longer_one_is_refused() {
        for part in ["()", "|e", ".a", "<a", "[a]", " if a else a"] {
            let source = |bytes: usize| format!("{{{{ a{} }}}}", part.repeat(bytes / part.len()));
            ChatTemplate::new(&source(SOURCE - 10), "", "").unwrap_or_else(|error| panic!("{part}: {error}"));
            let error = ChatTemplate::new(&source(SOURCE + 20), "", "").unwrap_err();
            assert!(error.to_string().contains("and 262144 are the most"), "{error}");
        }
    }

    #[test]
    fn values_that_hold_one_another_many_times_print_up_to_a_limit() {
        let source = "{% set ns = namespace(x='a' * 10000) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
        for end in ["{{ ns.x }}", "{{ ns.x | tojson }}"] {
            let reason = failure(&format!("{source}{end}"));
            assert!(reason.contains("more than 8388608 bytes"), "{reason}");
        }
    }

    #[test]
    fn a_source_that_breaks_the_compiler_does_not_compile() {
        for source in ["{% import 'a' as b ~ c %}", "{% from 'a' import b as c ~ d %}"] {
            let error = ChatTemplate::new(source, "", "").unwrap_err();
            assert!(matches!(error, TemplateError::Compile { .. }), "{error}");
        }
    }

    #[test]
    fn a_budget_follows_the_conversation() {
        let of = |messages: usize, text: &str| {
            budget(&Conversation::new(vec![json!({"role": "user", "content": text}); messages]))
        };
        assert!(of(1, "hi") < BASE + 1000 && of(1, &"x".repeat(100_000)) > BASE + 400_000);
        assert!(of(100, "hi") > BASE + 40_000);
        assert_eq!(of(100_000, "hi"), MOST);
    }

    #[test]
    fn work_that_panics_or_waits_is_an_error() {
        assert_eq!(within(1 << 20, || 7), Ok(7));
        // More than there are addresses.
        let refused = within(1 << 60, || 7).unwrap_err();
        assert!(matches!(refused, Broken::Thread { stack_bytes, .. } if stack_bytes == 1 << 60), "{refused}");
        assert_eq!(
            within(1 << 20, || -> u8 { std::panic::resume_unwind(Box::new(())) }).unwrap_err(),
            Broken::Panicked
        );
        let (end, ended) = channel::<()>();
        let late = within(1 << 20, move || ended.recv()).unwrap_err();
        assert_eq!(late.to_string(), "it did not end within 5 s");
        drop(end);
    }

    #[test]
    fn a_template_that_did_not_end_gets_no_second_thread() {
        // 2^31 comparisons: more than five seconds of them on any machine, and few enough to end some day.
        let source = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% set \
                      ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let conversation = Conversation::new(vec![json!({"role": "user", "content": "hi"})]);
        let render = || template.render(&conversation, &Guard::default()).unwrap_err().to_string();
        assert!(render().contains("did not end within 5 s"));
        assert!(render().contains("not run again"));
    }
}

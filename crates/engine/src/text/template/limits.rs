//! Bounds on what a template may do. A template comes with a downloaded file and is a program: it can loop for ever, double
//! a text until memory ends, or nest lists until a stack does.
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
/// Stack for each unit: one unit nests a value one deeper, and walking one level takes less than this.
const STACK_PER_UNIT: u64 = 512;
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
    #[error("no thread to run it on: {0}")]
    Thread(String),
}

/// Runs `work`, which spends at most `budget`, on a thread with a stack to match.
///
/// # Errors
/// It did not end in time, it panicked, or there was no thread.
pub(super) fn within<T: Send + 'static>(
    budget: u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Broken> {
    let (send, receive) = channel();
    let stack = (1 << 20) + budget * STACK_PER_UNIT;
    let spawned =
        thread::Builder::new().name("template".into()).stack_size(stack as usize).spawn(move || {
            let _ = send.send(work());
        });
    spawned.map_err(|error| Broken::Thread(error.to_string()))?;
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
        assert_eq!(within(1, || 7), Ok(7));
        assert_eq!(
            within(1, || -> u8 { std::panic::resume_unwind(Box::new(())) }).unwrap_err(),
            Broken::Panicked
        );
        let (end, ended) = channel::<()>();
        let late = within(1, move || ended.recv()).unwrap_err();
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

//! Filters that give a generator in Jinja2 (`map`, `select` and their kin): something to go over, always true, without a
//! length, that `tojson` refuses. Some templates depend on it, if only by refusing tools.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Value};
use minijinja::{Environment, Error, State, filters};

/// What such a filter gives.
#[derive(Debug)]
struct Generator(Vec<Value>);

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let this = self.clone();
        Enumerator::Iter(Box::new((0..self.0.len()).map(move |at| this.0[at].clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }
}

/// Replaces the filters. The engine's own, which give lists, stay under a second name.
pub(super) fn add_filters(env: &mut Environment<'_>) {
    macro_rules! generators {
        ($($name:ident),*) => {$({
            const LIST: &str = concat!("list_of_", stringify!($name));
            env.add_filter(LIST, filters::$name);
            env.add_filter(
                stringify!($name),
                |state: &mut State<'_, '_>, Rest(mut args): Rest<Value>, kwargs: Kwargs| {
                    if kwargs.args().next().is_some() {
                        args.push(Value::from(kwargs));
                    }
                    let list = state.apply_filter(LIST, &args)?;
                    Ok::<Value, Error>(Value::from_object(Generator(list.try_iter()?.collect())))
                },
            );
        })*};
    }
    generators!(map, select, reject, selectattr, rejectattr);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (expression, what Jinja2 prints; none for an error there).
    #[test]
    fn generators_are_no_lists() {
        let mut env = Environment::new();
        add_filters(&mut env);
        for (source, want) in [
            ("{{ [1, 2] | map('string') | list | length }}", Some("2")),
            ("{{ [1, 2] | map('string') | length }}", None),
            ("{{ 'yes' if [] | select }}{{ 'no' if not [] | select | list }}", Some("yesno")),
            (
                "{{ [{'a': 1}, {'b': 2}] | selectattr('a', 'defined') | map(attribute='a') | first }}",
                Some("1"),
            ),
            ("{% for x in [1, 2, 3] | reject('odd') %}{{ loop.index }}:{{ x }}{% endfor %}", Some("1:2")),
            ("{{ 2 in [1, 2] | map('int') }}{{ none | map('int') | list | length }}", Some("True0")),
        ] {
            assert_eq!(env.render_str(source, ()).ok().as_deref(), want, "{source}");
        }
    }
}

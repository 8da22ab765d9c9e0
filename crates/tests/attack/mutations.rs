//! Damage to valid files: most of it aimed at what a header is trusted for, the rest blind.
//!
//! Every function is pure: the damage depends on the random numbers alone, so a seed and an iteration name an input.

use std::ops::Range;

use serde_json::Value as Json;

use crate::Random;

/// Numbers that arithmetic and loops stumble over.
const NUMBERS: [u64; 20] = [
    0,
    1,
    2,
    3,
    5,
    31,
    33,
    0x7f,
    0xff,
    0xffff,
    1 << 20,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    1 << 48,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX,
];

fn pick<'a, T>(random: &mut Random, from: &'a [T]) -> &'a T {
    &from[random.below(from.len())]
}

/// A range of at most `most` bytes inside `len` bytes.
fn range(random: &mut Random, len: usize, most: usize) -> Range<usize> {
    let start = random.below(len.max(1));
    start..(start + random.below(most) + 1).min(len)
}

/// Blind damage: changed, inserted, removed, repeated, moved and cut bytes.
pub fn bytes(random: &mut Random, data: &mut Vec<u8>) {
    if data.is_empty() {
        data.push(random.bits() as u8);
        return;
    }
    match random.below(8) {
        0 | 1 => {
            let at = random.below(data.len());
            data[at] ^= 1 << random.below(8);
        }
        2 => {
            let at = random.below(data.len());
            data[at] = *pick(random, &[0, 0xff, 0x80, 0x7f, b'"', b'{', b'[', b'9']);
        }
        3 => {
            let at = range(random, data.len(), 16);
            data.drain(at);
        }
        4 => {
            let at = range(random, data.len(), 64);
            let copy = data[at.clone()].to_vec();
            data.splice(at.start..at.start, copy);
        }
        5 => {
            let (from, to) = (range(random, data.len(), 32), random.below(data.len()));
            for (i, at) in from.enumerate() {
                if to + i < data.len() {
                    data[to + i] = data[at];
                }
            }
        }
        6 => data.truncate(random.below(data.len())),
        _ => {
            let at = random.below(data.len());
            let new: Vec<u8> = (0..random.below(8) + 1).map(|_| random.bits() as u8).collect();
            data.splice(at..at, new);
        }
    }
}

/// A number in a GGUF header, of 4 or 8 bytes.
#[derive(Clone, Copy, Debug)]
struct Field {
    at: usize,
    bytes: usize,
}

/// The numbers of a GGUF header: version, counts, lengths, types, dimensions, offsets and number values. Stops where
/// the header makes no sense any more, so that damage can be done to what is damaged.
fn gguf_fields(data: &[u8]) -> Vec<Field> {
    let mut walk = Walk { data, at: 4, fields: Vec::new() };
    walk.header();
    walk.fields
}

struct Walk<'a> {
    data: &'a [u8],
    at: usize,
    fields: Vec<Field>,
}

impl Walk<'_> {
    fn number(&mut self, bytes: usize) -> Option<u64> {
        let found = self.data.get(self.at..self.at + bytes)?;
        self.fields.push(Field { at: self.at, bytes });
        self.at += bytes;
        Some(found.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    fn skip(&mut self, bytes: u64) -> Option<()> {
        let end = self.at.checked_add(usize::try_from(bytes).ok()?)?;
        self.at = end;
        (end <= self.data.len()).then_some(())
    }

    fn header(&mut self) -> Option<()> {
        self.number(4)?;
        let (tensors, keys) = (self.number(8)?, self.number(8)?);
        for _ in 0..keys {
            let name = self.number(8)?;
            self.skip(name)?;
            let kind = self.number(4)?;
            self.value(kind, 0)?;
        }
        for _ in 0..tensors {
            let name = self.number(8)?;
            self.skip(name)?;
            for _ in 0..self.number(4)? {
                self.number(8)?;
            }
            self.number(4)?;
            self.number(8)?;
        }
        Some(())
    }

    fn value(&mut self, kind: u64, depth: usize) -> Option<()> {
        match kind {
            0 | 1 | 7 => self.skip(1),
            2 | 3 => self.skip(2),
            4..=6 => self.number(4).map(drop),
            8 => {
                let len = self.number(8)?;
                self.skip(len)
            }
            9 if depth < 8 => {
                let (kind, len) = (self.number(4)?, self.number(8)?);
                (0..len).try_for_each(|_| self.value(kind, depth + 1))
            }
            10..=12 => self.number(8).map(drop),
            _ => None,
        }
    }
}

/// Damage to a GGUF file: a number of its header, a swap of two, or bytes.
pub fn gguf(random: &mut Random, data: &mut Vec<u8>) {
    let fields = gguf_fields(data);
    if fields.is_empty() || random.below(5) == 0 {
        // Mostly in the header, which is what is parsed.
        let end = fields.last().map_or(data.len(), |f| f.at + f.bytes).min(data.len());
        let mut header = data[..end].to_vec();
        bytes(random, &mut header);
        data.splice(..end, header);
        return;
    }
    let field = *pick(random, &fields);
    let range = field.at..field.at + field.bytes;
    let old = data[range.clone()].iter().rev().fold(0u64, |n, &b| n << 8 | u64::from(b));
    let new = match random.below(7) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        2 => old ^ 1 << random.below(8 * field.bytes),
        3 => old.wrapping_mul(2),
        4 => {
            let other = *pick(random, &fields);
            let value = &data[other.at..other.at + other.bytes];
            value.iter().rev().fold(0u64, |n, &b| n << 8 | u64::from(b))
        }
        5 => random.below(48) as u64,
        _ => *pick(random, &NUMBERS),
    };
    data[range].copy_from_slice(&new.to_le_bytes()[..field.bytes]);
}

/// Damage to a safetensors file: to its header as JSON, to the header's length, or to bytes of both.
pub fn safetensors(random: &mut Random, data: &mut Vec<u8>) {
    let len = data.first_chunk().map_or(0, |n| u64::from_le_bytes(*n) as usize);
    let header = len.checked_add(8).and_then(|end| data.get(8..end)).map(<[u8]>::to_vec);
    match (random.below(6), header) {
        (0, _) if data.len() >= 8 => {
            let value = if random.below(2) == 0 { len as u64 + 1 } else { *pick(random, &NUMBERS) };
            data[..8].copy_from_slice(&value.to_le_bytes());
        }
        (1..=4, Some(mut header)) => {
            json(random, &mut header);
            data.splice(8..8 + len, header.iter().copied());
            data[..8].copy_from_slice(&(header.len() as u64).to_le_bytes());
        }
        _ => bytes(random, data),
    }
}

/// Damage to a JSON text: values replaced, swapped, removed and repeated; or to its bytes.
pub fn json(random: &mut Random, text: &mut Vec<u8>) {
    let parsed = serde_json::from_slice::<Json>(text).ok();
    match parsed {
        Some(mut value) if random.below(6) > 0 => {
            let donor = nth(&mut value, &mut random.below(usize::MAX >> 1).min(400)).cloned();
            let count = size(&value);
            let mut at = random.below(count);
            if let Some(place) = nth(&mut value, &mut at) {
                replace(random, place, donor);
            }
            *text = value.to_string().into_bytes();
        }
        _ => bytes(random, text),
    }
}

/// Values in a value, itself included.
fn size(value: &Json) -> usize {
    1 + match value {
        Json::Array(items) => items.iter().map(size).sum(),
        Json::Object(fields) => fields.values().map(size).sum(),
        _ => 0,
    }
}

/// The value at this place in depth-first order.
fn nth<'a>(value: &'a mut Json, at: &mut usize) -> Option<&'a mut Json> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Json::Array(items) => items.iter_mut().find_map(|item| nth(item, at)),
        Json::Object(fields) => fields.values_mut().find_map(|item| nth(item, at)),
        _ => None,
    }
}

fn replace(random: &mut Random, place: &mut Json, donor: Option<Json>) {
    let number = *pick(random, &NUMBERS);
    let new = match (random.below(12), &mut *place) {
        (0, _) => Json::Null,
        (1, _) => Json::from(number),
        (2, _) => Json::from(number as i64),
        (3, _) => Json::from(*pick(random, &[1e300, -1.0, 0.5, 1e-300, 4294967296.0, -0.0])),
        (4, _) => Json::from(*pick(random, &["", "a", "\u{0}", "(a*)*b", "\u{10ffff}", "..", "BF16", "I64"])),
        (5, _) => Json::Array(Vec::new()),
        (6, _) => Json::Object(serde_json::Map::new()),
        (7, _) => (0..random.below(200)).fold(place.take(), |inner, _| Json::Array(vec![inner])),
        (8, Json::Array(items)) if !items.is_empty() => {
            let at = random.below(items.len());
            if random.below(2) == 0 {
                items.remove(at);
            } else {
                items.insert(at, items[at].clone());
            }
            return;
        }
        (8, Json::Object(fields)) if !fields.is_empty() => {
            let at = random.below(fields.len());
            let name = fields.keys().nth(at).cloned().unwrap_or_default();
            let value = fields.remove(&name);
            if random.below(2) == 0 {
                fields.insert(format!("{name}x"), value.unwrap_or_default());
            }
            return;
        }
        (9, Json::Number(old)) => {
            let old = old.as_u64().unwrap_or(1);
            Json::from(if random.below(2) == 0 { old.wrapping_add(1) } else { old.wrapping_sub(1) })
        }
        (10, Json::String(old)) => {
            let mut text = std::mem::take(old).into_bytes();
            bytes(random, &mut text);
            Json::String(String::from_utf8_lossy(&text).into_owned())
        }
        _ => donor.unwrap_or_default(),
    };
    *place = new;
}

/// Pieces of templates: tags that must pair, loops that grow, names that need not exist.
const FRAGMENTS: [&str; 62] = [
    "{% for m in messages %}",
    "{% for i in range(99999) %}",
    "{% for a in messages recursive %}",
    "{{ loop(messages) }}",
    "{% endfor %}",
    "{% if m.role == 'user' %}",
    "{% elif tools %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = 'ab' %}",
    "{% set x = x ~ x %}",
    "{% set x = [x, x] %}",
    "{% set x = x + x %}",
    "{% set x = x * 99 %}",
    "{% set x = {'a': x} %}",
    "{% set ns = namespace(a=[], n=0) %}",
    "{% set ns.a = [ns.a] %}",
    "{% set ns.a = ns.a + [ns.a] %}",
    "{% set ns.n = ns.n + 1 %}",
    "{% set ns.n = ns.n * ns.n %}",
    "{% set y %}",
    "{% endset %}",
    "{% macro f(a, b=1) %}",
    "{% endmacro %}",
    "{{ f(f) }}",
    "{{ f(x, f(1)) }}",
    "{% call f(1) %}",
    "{% endcall %}",
    "{{ caller() }}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{{ x | tojson }}",
    "{{ x | tojson(indent=99) }}",
    "{{ ns.a }}",
    "{{ ns.a | tojson }}",
    "{{ ns.a | string | length }}",
    "{{ x | indent(99999) }}",
    "{{ x | replace('a', x) }}",
    "{{ x | join(x) }}",
    "{{ x | list | sort | reverse | unique | batch(3) | list }}",
    "{{ messages | map(attribute='content') | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list }}",
    "{{ messages[0]['content'][::-1][1:-1:2] }}",
    "{{ messages[-1].content.split(' ')[0].strip().upper() }}",
    "{{ x.center(99999) }}",
    "{{ x.replace('', x) }}",
    "{{ '%s %d %99999d' % (1, 2, 3) }}",
    "{{ '{0:>99999}'.format(x) }}",
    "{{ strftime_now('%Y-%m-%d %99999d %') }}",
    "{{ raise_exception('no') }}",
    "{% break %}",
    "{% continue %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ 9223372036854775807 + 1 }}",
    "{{ -9223372036854775808 // -1 }}",
    "{{ 1 // 0 }}",
    "{{ 2 ** 999 }}",
    "{{ 1e308 * 10 }}",
    "{% include 'chat_template' %}",
    "{% import 'chat_template' as t %}",
    "{% extends 'chat_template' %}",
];

/// Damage to a template: fragments inserted, lines of it removed, repeated and nested, or its characters changed.
pub fn template(random: &mut Random, source: &mut String) {
    let at = |random: &mut Random, text: &str| {
        let mut at = random.below(text.len() + 1);
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    match random.below(8) {
        0..=3 => {
            let place = at(random, source);
            let fragment: &&str = pick(random, &FRAGMENTS);
            source.insert_str(place, fragment);
        }
        4 => {
            let deep = 1 + random.below(300);
            let (open, close) =
                *pick(random, &[("{% if 1 %}", "{% endif %}"), ("{{ (", ") }}"), ("{{ [", "] }}")]);
            let inner: (String, String) = match open {
                "{% if 1 %}" => (open.repeat(deep), close.repeat(deep)),
                "{{ (" => (format!("{{{{ {}1", "(".repeat(deep)), format!("{} }}}}", ")".repeat(deep))),
                _ => (format!("{{{{ {}1", "[".repeat(deep)), format!("{} }}}}", "]".repeat(deep))),
            };
            let place = at(random, source);
            source.insert_str(place, &(inner.0 + &inner.1));
        }
        5 => {
            let (a, b) = (at(random, source), at(random, source));
            let piece = source[a.min(b)..a.max(b)].to_string();
            let place = at(random, source);
            source.insert_str(place, &piece);
        }
        6 => {
            let (a, b) = (at(random, source), at(random, source));
            source.replace_range(a.min(b)..a.max(b), "");
        }
        _ => {
            let mut text = std::mem::take(source).into_bytes();
            bytes(random, &mut text);
            *source = String::from_utf8_lossy(&text).into_owned();
        }
    }
    if source.len() > 20_000 {
        let mut end = 20_000;
        while !source.is_char_boundary(end) {
            end -= 1;
        }
        source.truncate(end);
    }
}

//! The data of one step as kernels read it: `struct Step` of `kernels/common.cuh`, and the arrays after it.
//!
//! Offsets follow from the bucket and the widths of the page tables alone, so the blob has one size and one address for
//! all steps of a program.

use ingle_graph::sample::{CHANGES, Change, Sampling};
use ingle_graph::{Bucket, Inputs, KvInputs};

use crate::{Error, Result};

/// Most KV groups of a model: `KV_GROUPS`.
pub const KV_GROUPS: usize = 8;

/// Source of a token that the host knows: `FROM_HOST`.
pub const FROM_HOST: u32 = u32::MAX;

/// Words before the groups, and of a group.
const WORDS: usize = 12;
const GROUP_WORDS: usize = 4;

/// Words of `struct Sampler`, and of `struct Change`.
const SAMPLER_WORDS: usize = 16;
const CHANGE_WORDS: usize = 4;

/// Arrays begin at multiples of this.
const ALIGN: usize = 16;

/// Where everything is in the blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLayout {
    bucket: Bucket,
    token_ids: usize,
    token_sources: usize,
    positions: usize,
    sequence_of: usize,
    wanted_rows: usize,
    groups: Vec<GroupLayout>,
    /// Where samplers are, and the changes of their logits, which come last: of them there is as much as the step has.
    samplers: Option<[usize; 2]>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupLayout {
    cells: usize,
    tables: usize,
    /// Widest page table.
    stride: usize,
}

impl StepLayout {
    /// Layout for steps of a bucket, with page tables of at most these widths, one for each KV group.
    ///
    /// # Errors
    /// More groups than [`KV_GROUPS`]; a blob of 4 GiB or more.
    pub fn new(bucket: Bucket, strides: &[usize]) -> Result<Self> {
        if strides.len() > KV_GROUPS {
            return Err(Error::Refused(format!("{} KV groups: kernels know {KV_GROUPS}", strides.len())));
        }
        let mut end = 4 * (WORDS + GROUP_WORDS * KV_GROUPS);
        let mut array = |words: Option<usize>| -> Result<usize> {
            let at = end;
            let next = words
                .and_then(|words| words.checked_mul(4)?.checked_next_multiple_of(ALIGN)?.checked_add(at));
            end = next.filter(|&next| u32::try_from(next).is_ok()).ok_or_else(|| {
                Error::Refused(format!("the data of a step of {bucket:?} with tables of {strides:?} pages"))
            })?;
            Ok(at)
        };
        let [token_ids, token_sources, positions, sequence_of] =
            [array(Some(bucket.t))?, array(Some(bucket.t))?, array(Some(bucket.t))?, array(Some(bucket.t))?];
        let wanted_rows = array(Some(bucket.r))?;
        let mut groups = Vec::new();
        for &stride in strides {
            let (cells, tables) = (array(Some(bucket.t))?, array(bucket.s.checked_mul(stride))?);
            groups.push(GroupLayout { cells, tables, stride });
        }
        Ok(Self {
            bucket,
            token_ids,
            token_sources,
            positions,
            sequence_of,
            wanted_rows,
            groups,
            samplers: None,
            bytes: end,
        })
    }

    /// With room for how the tokens of wanted rows are chosen.
    ///
    /// # Errors
    /// A blob of 4 GiB or more.
    pub fn with_samplers(self) -> Result<Self> {
        let changes = self.bytes + 4 * SAMPLER_WORDS * self.bucket.r;
        let room = self.bucket.r.checked_mul(4 * CHANGE_WORDS * CHANGES);
        let bytes = room.and_then(|room| room.checked_add(changes));
        match bytes.filter(|&bytes| u32::try_from(bytes).is_ok()) {
            Some(bytes) => Ok(Self { samplers: Some([self.bytes, changes]), bytes, ..self }),
            None => {
                Err(Error::Refused(format!("the data of a step of {:?} that chooses tokens", self.bucket)))
            }
        }
    }

    /// Bytes of the blob.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The words of `struct Step`, by their names in it.
    fn words(&self, inputs: &Inputs) -> Vec<(&'static str, usize)> {
        let mut words = vec![
            ("tokens", inputs.tokens.len()),
            ("wanted", inputs.wanted.len()),
            ("sequences", inputs.sequence_count()),
            ("groups", self.groups.len()),
            ("token_ids", self.token_ids),
            ("token_sources", self.token_sources),
            ("positions", self.positions),
            ("sequence_of", self.sequence_of),
            ("wanted_rows", self.wanted_rows),
            ("samplers", self.samplers.map_or(0, |[samplers, _]| samplers)),
            ("reserved", 0),
            ("reserved", 0),
        ];
        let none = GroupLayout { cells: 0, tables: 0, stride: 0 };
        for i in 0..KV_GROUPS {
            let group = self.groups.get(i).unwrap_or(&none);
            let stride = inputs.kv.get(i).map_or(0, |kv| kv.table_stride);
            let offsets = [("cells", group.cells), ("tables", group.tables), ("table_stride", stride)];
            words.extend(offsets);
            words.push(("reserved", 0));
        }
        words
    }

    /// Writes a step into the blob. `sources[row]` is [`FROM_HOST`], or the index of the token that the device sampled and
    /// that stands in for the host's; without sources all are the host's. What lies behind the step's own rows stays as it
    /// is: no kernel reads it. Returns how many of the bytes the step has need of, from the first on.
    ///
    /// # Errors
    /// Inputs that are larger than the bucket, tables of another width, a blob of another size. That indices are sound is
    /// [`Inputs::check`]'s to find.
    pub fn fill(&self, inputs: &Inputs, sources: Option<&[u32]>, blob: &mut [u8]) -> Result<usize> {
        let (t, r, s) = (inputs.tokens.len(), inputs.wanted.len(), inputs.sequence_count());
        let Bucket { t: most_t, r: most_r, s: most_s } = self.bucket;
        if t > most_t || r > most_r || s > most_s || blob.len() != self.bytes {
            return Err(Error::Refused(format!(
                "a step of {t} tokens, {s} sequences, {r} wanted rows for {} bytes of {:?} in {} bytes",
                self.bytes,
                self.bucket,
                blob.len()
            )));
        }
        let fits = |(kv, group): (&KvInputs, &GroupLayout)| kv.table_stride <= group.stride;
        // Tables of groups that the program does not have are nobody's.
        if inputs.kv.len() < self.groups.len() || !inputs.kv.iter().zip(&self.groups).all(fits) {
            let most: Vec<usize> = self.groups.iter().map(|group| group.stride).collect();
            return Err(Error::Refused(format!("page tables for KV groups of at most {most:?} pages")));
        }
        let from_host = vec![FROM_HOST; if sources.is_none() { t } else { 0 }];
        let sources = sources.unwrap_or(&from_host);
        let mut put = |at: usize, words: &[u32], wanted: usize, what: &str| -> Result<()> {
            if words.len() != wanted {
                return Err(Error::Refused(format!("{} {what} for {wanted}", words.len())));
            }
            let to = blob[at..at + 4 * words.len()].chunks_exact_mut(4);
            to.zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
            Ok(())
        };
        let header: Vec<u32> = self.words(inputs).into_iter().map(|(_, word)| word as u32).collect();
        put(0, &header, header.len(), "words")?;
        put(self.token_ids, &inputs.tokens, t, "tokens")?;
        put(self.token_sources, sources, t, "token sources")?;
        put(self.positions, &inputs.positions, t, "positions")?;
        put(self.sequence_of, &inputs.sequences, t, "sequence indices")?;
        put(self.wanted_rows, &inputs.wanted, r, "wanted rows")?;
        for (kv, group) in inputs.kv.iter().zip(&self.groups) {
            put(group.cells, &kv.cells, t, "cells")?;
            let words = s * kv.table_stride;
            put(group.tables, kv.tables.get(..words).unwrap_or_default(), words, "pages in tables")?;
        }
        let Some([samplers, mut end]) = self.samplers else { return Ok(self.bytes) };
        for row in 0..r {
            let sampling = inputs.sampling(row);
            let changes = sampling.map_or(&[][..], |sampling| &sampling.changes);
            if changes.len() > CHANGES {
                return Err(Error::Refused(format!("{} changes of logits for {CHANGES}", changes.len())));
            }
            let words: Vec<u32> = sampler(sampling, end).into_iter().map(|(_, word)| word).collect();
            put(samplers + 4 * SAMPLER_WORDS * row, &words, SAMPLER_WORDS, "words of a sampler")?;
            for words in changes.iter().map(change) {
                put(end, &words, CHANGE_WORDS, "words of a change")?;
                end += 4 * CHANGE_WORDS;
            }
        }
        Ok(end)
    }
}

/// The words of `struct Sampler`, by their names in it; `changes`: where those of its logits are.
fn sampler(sampling: Option<&Sampling>, changes: usize) -> Vec<(&'static str, u32)> {
    let nothing = Sampling::greedy();
    let of = sampling.unwrap_or(&nothing);
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    let ([seed, seed_high], [position, position_high]) = (halves(of.seed), halves(of.position));
    vec![
        ("asked", sampling.is_some().into()),
        ("temperature", of.temperature.to_bits()),
        ("top_p", of.top_p.to_bits()),
        ("min_p", of.min_p.to_bits()),
        ("repetition_penalty", of.repetition_penalty.to_bits()),
        ("frequency_penalty", of.frequency_penalty.to_bits()),
        ("presence_penalty", of.presence_penalty.to_bits()),
        ("top_k", of.top_k),
        ("seed", seed),
        ("seed", seed_high),
        ("choice", of.choice),
        ("position", position),
        ("position", position_high),
        ("changes", changes as u32),
        ("change_count", of.changes.len() as u32),
        ("reserved", 0),
    ]
}

/// The words of `struct Change`.
fn change(change: &Change) -> [u32; CHANGE_WORDS] {
    [change.token, change.bias.to_bits(), change.seen.into(), change.count]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::HEADERS;

    /// Fields of a struct of common.cuh in order, each a word, arrays word by word.
    fn fields(name: &str) -> Vec<String> {
        let text = HEADERS.iter().find(|(header, _)| *header == "common.cuh").expect("it is listed").1;
        let body = text.split(&format!("struct {name} {{")).nth(1).and_then(|rest| rest.split("};").next());
        let lines = body.expect("the struct is there").lines();
        let declarations = lines.map(|line| line.split("//").next().unwrap_or_default().trim());
        let mut words = Vec::new();
        for declaration in declarations.filter(|line| !line.is_empty()) {
            if declaration == "StepGroup kv[KV_GROUPS];" {
                (0..KV_GROUPS).for_each(|_| words.extend(fields("StepGroup")));
                continue;
            }
            let field = declaration.strip_prefix("u32 ").and_then(|field| field.strip_suffix(';'));
            let field = field.unwrap_or_else(|| panic!("{declaration}: not one word, or words"));
            let (name, count) = match field.split_once('[') {
                Some((name, rest)) => (name, rest.trim_end_matches(']').parse().expect("a number")),
                None => (field, 1),
            };
            words.extend((0..count).map(|_| name.to_string()));
        }
        words
    }

    fn inputs() -> Inputs {
        let kv = |stride: usize, first: u32| KvInputs {
            cells: vec![first, first + 1, first + 32],
            tables: (0..2 * stride as u32).map(|page| page + first).collect(),
            table_stride: stride,
        };
        Inputs {
            tokens: vec![5, 6, 7],
            positions: vec![10, 11, 0],
            sequences: vec![0, 0, 1],
            kv: vec![kv(4, 100), kv(3, 200)],
            wanted: vec![1, 2],
            ..Inputs::default()
        }
    }

    #[test]
    fn words_are_the_fields_of_the_struct() {
        let layout = StepLayout::new(Bucket { t: 4, s: 2, r: 3 }, &[4, 3]).expect("it fits");
        let names: Vec<String> = layout.words(&inputs()).into_iter().map(|(name, _)| name.into()).collect();
        assert_eq!(names, fields("Step"));
        assert_eq!(names.len(), WORDS + GROUP_WORDS * KV_GROUPS);
        let text = HEADERS[0].1;
        assert!(text.contains(&format!("#define KV_GROUPS {KV_GROUPS}\n")));
        assert!(text.contains(&format!("#define PAGE {}u\n", ingle_graph::PAGE)));
        assert!(text.contains(&format!("#define FROM_HOST {FROM_HOST:#010X}u\n").replace("0X", "0x")));
    }

    /// Arrays do not overlap, and lie where the words say, whatever the step is.
    #[test]
    fn arrays_lie_where_the_words_say() {
        let layout = StepLayout::new(Bucket { t: 4, s: 2, r: 3 }, &[4, 3]).expect("it fits");
        let (inputs, mut blob) = (inputs(), vec![0xEE; layout.bytes()]);
        layout.fill(&inputs, Some(&[FROM_HOST, 9, FROM_HOST]), &mut blob).expect("it fits");
        let word = |at: usize| u32::from_ne_bytes([blob[at], blob[at + 1], blob[at + 2], blob[at + 3]]);
        let array = |at: u32, n: usize| (0..n).map(|i| word(at as usize + 4 * i)).collect::<Vec<_>>();
        let field =
            |name: &str| word(4 * fields("Step").iter().position(|field| field == name).expect("a field"));
        assert_eq!([field("tokens"), field("wanted"), field("sequences"), field("groups")], [3, 2, 2, 2]);
        assert_eq!(array(field("token_ids"), 3), inputs.tokens);
        assert_eq!(array(field("token_sources"), 3), [FROM_HOST, 9, FROM_HOST]);
        assert_eq!(array(field("positions"), 3), inputs.positions);
        assert_eq!(array(field("sequence_of"), 3), inputs.sequences);
        assert_eq!(array(field("wanted_rows"), 2), inputs.wanted);
        for (i, kv) in inputs.kv.iter().enumerate() {
            let group = 4 * (WORDS + GROUP_WORDS * i);
            assert_eq!(array(word(group), 3), kv.cells);
            assert_eq!(array(word(group + 4), 2 * kv.table_stride), kv.tables);
            assert_eq!(word(group + 8) as usize, kv.table_stride);
        }
    }

    /// Samplers and changes lie where the words say; of the room for changes a step has what it uses.
    #[test]
    fn samplers_lie_where_the_words_say() {
        let changes: Vec<Change> =
            (0..3).map(|i| Change { token: 5 + i, bias: 0.5, seen: i == 1, count: 7 }).collect();
        let greedy = Sampling { seed: 3 << 32 | 4, changes, ..Sampling::greedy() };
        let inputs = Inputs { sampling: vec![None, Some(greedy.clone())], ..inputs() };
        let layout =
            StepLayout::new(Bucket { t: 4, s: 2, r: 3 }, &[4, 3]).and_then(StepLayout::with_samplers);
        let layout = layout.expect("it fits");
        let mut blob = vec![0xEE; layout.bytes()];
        let used = layout.fill(&inputs, None, &mut blob).expect("it fits");
        let word = |at: usize| u32::from_ne_bytes([blob[at], blob[at + 1], blob[at + 2], blob[at + 3]]);
        let at =
            |name: &str, of: &str| 4 * fields(of).iter().position(|field| field == name).expect("a field");
        let samplers = word(at("samplers", "Step")) as usize;
        let field = |row: usize, name: &str| word(samplers + 64 * row + at(name, "Sampler"));
        assert_eq!([field(0, "asked"), field(0, "change_count"), field(1, "asked")], [0, 0, 1]);
        assert_eq!([field(1, "seed"), field(1, "top_p"), field(1, "change_count")], [4, 1f32.to_bits(), 3]);
        for (i, want) in greedy.changes.iter().enumerate() {
            let from = field(1, "changes") as usize + 16 * i;
            assert_eq!([from, from + 4, from + 8, from + 12].map(word), change(want));
        }
        assert_eq!(used, field(1, "changes") as usize + 3 * 16);
        let names: Vec<&str> = sampler(None, 0).iter().map(|(name, _)| *name).collect();
        assert_eq!(
            (fields("Sampler"), fields("Change").len()),
            (names.into_iter().map(String::from).collect(), CHANGE_WORDS)
        );
        let many = (0..CHANGES as u32 + 1).map(|token| Change { token, bias: 0.0, seen: true, count: 0 });
        let sampling = vec![Some(Sampling { changes: many.collect(), ..Sampling::greedy() })];
        assert!(
            layout.fill(&Inputs { sampling, ..inputs }, None, &mut blob).is_err(),
            "more than there is room for"
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        assert!(StepLayout::new(Bucket { t: 1, s: 1, r: 1 }, &[1; KV_GROUPS + 1]).is_err());
        assert!(StepLayout::new(Bucket { t: usize::MAX, s: 1, r: 1 }, &[]).is_err());
        let layout = StepLayout::new(Bucket { t: 2, s: 2, r: 3 }, &[4, 3]).expect("it fits");
        let said =
            layout.fill(&inputs(), None, &mut vec![0; layout.bytes()]).expect_err("3 of 2").to_string();
        assert!(said.starts_with("a step of 3 tokens"), "{said}");
        let layout = StepLayout::new(Bucket { t: 4, s: 2, r: 3 }, &[4, 2]).expect("it fits");
        assert!(layout.fill(&inputs(), None, &mut vec![0; layout.bytes()]).is_err(), "a wider table");
        let layout = StepLayout::new(Bucket { t: 4, s: 2, r: 3 }, &[4, 3]).expect("it fits");
        assert!(
            layout.fill(&inputs(), Some(&[1]), &mut vec![0; layout.bytes()]).is_err(),
            "one source for 3"
        );
        assert!(layout.fill(&inputs(), None, &mut [0; 10]).is_err(), "10 bytes");
    }
}

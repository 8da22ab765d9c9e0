//! Reading what writers write, and one clear refusal for every kind of damage. Files that only a hostile writer
//! makes are spelled byte by byte.

use super::*;

/// Bytes of a file, in the order of the format.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(version: u32, tensors: u64, keys: u64) -> Self {
        Self(MAGIC.to_vec()).u32(version).u64(tensors).u64(keys)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn string(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let raw = self.string(name).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, dim| raw.u64(*dim)).u32(kind).u64(offset)
    }

    fn data(mut self, len: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + len, 7);
        self
    }

    fn parse(self) -> Result<Gguf> {
        Gguf::parse(&Bytes::from(self.0))
    }

    /// The message of the error that this file must give.
    #[track_caller]
    fn refused(self) -> String {
        self.parse().expect_err("the file must be refused").to_string()
    }
}

#[track_caller]
fn assert_says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

fn metadata(build: impl FnOnce(&mut Writer<'_>)) -> Metadata {
    let mut writer = Writer::new();
    build(&mut writer);
    Gguf::parse(&Bytes::from(writer.to_bytes())).unwrap().metadata
}

fn fixture() -> Bytes {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gguf/llama-s1/model-legacy.gguf");
    Bytes::map(path.as_ref()).unwrap()
}

#[test]
fn a_real_file_reads() {
    let gguf = Gguf::parse(&fixture()).unwrap();
    let keys = &gguf.metadata;
    assert_eq!((gguf.version, gguf.alignment), (3, 32));
    assert_eq!(keys.str("general.architecture").unwrap(), "llama");
    assert_eq!(keys.usize("llama.attention.head_count_kv").unwrap(), 2);
    assert_eq!(keys.strings("tokenizer.ggml.tokens").unwrap().len(), 512);
    assert_eq!(keys.i32s("tokenizer.ggml.token_type").unwrap().len(), 512);
    let embedding = gguf.tensors.iter().find(|t| t.name == "token_embd.weight").unwrap();
    assert_eq!(embedding.shape, [512, 64]);
    assert_eq!((embedding.rows(), embedding.cols(), embedding.elements()), (512, 64, 512 * 64));
    let dtypes: std::collections::BTreeSet<_> = gguf.tensors.iter().map(|t| t.dtype).collect();
    let mixed = [DType::F32, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0];
    assert!(dtypes.is_subset(&mixed.into()) && dtypes.len() > 3, "{dtypes:?}");
}

#[test]
fn every_value_type_reads_back() {
    let keys = metadata(|w| {
        w.set("u8", &200u8).unwrap();
        w.set("i8", &-3i8).unwrap();
        w.set("u16", &60_000u16).unwrap();
        w.set("i16", &-300i16).unwrap();
        w.set("u32", &4_000_000_000u32).unwrap();
        w.set("i32", &-7i32).unwrap();
        w.set("u64", &(1u64 << 40)).unwrap();
        w.set("i64", &9i64).unwrap();
        w.set("f32", &0.5f32).unwrap();
        w.set("f64", &0.1f64).unwrap();
        w.set("yes", &true).unwrap();
        w.set("text", "hé").unwrap();
        w.set("texts", &["a", "", "c d"]).unwrap();
        w.set("floats", &[1.5f32, -2.0]).unwrap();
        w.set("ints", &[1i32, -1]).unwrap();
        w.set("bools", &vec![true, false]).unwrap();
        w.set("empty", &Vec::<String>::new()).unwrap();
        w.set("nested", &[vec![1u8, 2], vec![], vec![3]]).unwrap();
    });
    assert_eq!(keys.u32("u8").unwrap(), 200);
    assert_eq!(keys.i32("i8").unwrap(), -3);
    assert_eq!(keys.u32("u16").unwrap(), 60_000);
    assert_eq!(keys.i32("i16").unwrap(), -300);
    assert_eq!(keys.u64("u32").unwrap(), 4_000_000_000);
    assert_eq!(keys.i32("i32").unwrap(), -7);
    assert_eq!(keys.usize("u64").unwrap(), 1 << 40);
    assert_eq!(keys.u32("i64").unwrap(), 9);
    assert_eq!(keys.f32("f32").unwrap(), 0.5);
    assert_eq!(keys.f32("f64").unwrap(), 0.1);
    assert!(keys.bool("yes").unwrap());
    assert_eq!(keys.str("text").unwrap(), "hé");
    assert_eq!(keys.strings("texts").unwrap(), ["a", "", "c d"]);
    assert_eq!(keys.f32s("floats").unwrap(), [1.5, -2.0]);
    assert_eq!(keys.i32s("ints").unwrap(), [1, -1]);
    assert_eq!(keys.bools_opt("bools").unwrap().unwrap(), [true, false]);
    assert!(keys.strings("empty").unwrap().is_empty());
    let shown: Vec<_> = keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(shown[3..6], ["i16=-300", "u32=4000000000", "i32=-7"]);
    assert_eq!(shown[11..14], ["text=\"hé\"", "texts=[\"a\", \"\", \"c d\"]", "floats=[1.5, -2]"]);
    assert_eq!(shown[17], "nested=[[1, 2], [], [3]]");
    assert_eq!(keys.keys().count(), keys.len());
}

#[test]
fn getters_say_what_they_found_and_wanted() {
    let keys = metadata(|w| {
        w.set("big", &(1u64 << 40)).unwrap();
        w.set("negative", &-1i32).unwrap();
        w.set("text", "x").unwrap();
        w.set("mixed", &[1i64, 1 << 40]).unwrap();
        w.set("flags", &[1u8; 9]).unwrap();
    });
    assert_says(&keys.u32("big").unwrap_err().to_string(), &["\"big\"", "u64 1099511627776", "wanted u32"]);
    assert_says(
        &keys.usize("negative").unwrap_err().to_string(),
        &["\"negative\"", "i32 -1", "wanted usize"],
    );
    assert_says(&keys.f32_opt("text").unwrap_err().to_string(), &["\"text\"", "a string", "wanted f32"]);
    assert_says(&keys.bool("big").unwrap_err().to_string(), &["wanted bool"]);
    assert_says(&keys.strings("text").unwrap_err().to_string(), &["a string", "wanted array of strings"]);
    let message = keys.u32s("mixed").unwrap_err().to_string();
    assert_says(&message, &["\"mixed\"", "i64 1099511627776 at index 1", "wanted array of u32"]);
    assert_says(&keys.str("absent").unwrap_err().to_string(), &["\"absent\" is missing"]);
    assert_eq!(keys.str_opt("absent").unwrap(), None);
    assert_eq!(keys.get("flags").unwrap().to_string(), "[1, 1, 1, 1, 1, 1, ... 9 in all]");
}

#[test]
fn a_number_per_layer_is_a_number_or_an_array() {
    let keys = metadata(|w| {
        w.set("one", &4u32).unwrap();
        w.set("each", &[1i32, 2, 3]).unwrap();
    });
    assert_eq!(keys.u32_per_layer_opt("one", 3).unwrap().unwrap(), [4, 4, 4]);
    assert_eq!(keys.u32_per_layer_opt("each", 3).unwrap().unwrap(), [1, 2, 3]);
    assert_eq!(keys.u32_per_layer_opt("absent", 3).unwrap(), None);
    assert_says(
        &keys.u32_per_layer_opt("each", 2).unwrap_err().to_string(),
        &["\"each\"", "3 values for 2 layers"],
    );
}

/// ggml-org/llama.cpp#25378, antirez/gguf-tools#25.
#[test]
fn too_many_dimensions() {
    for dims in [5, 9, u32::MAX] {
        let raw = Raw::new(3, 1, 0).string("blk.0.w").u32(dims).u64(1).u64(1);
        assert_says(&raw.refused(), &["\"blk.0.w\"", &dims.to_string(), "at most 4"]);
    }
}

#[test]
fn a_tensor_without_dimensions_is_a_scalar() {
    let gguf = Raw::new(3, 1, 0).tensor("s", &[], 0, 0).data(4).parse().unwrap();
    assert_eq!((gguf.tensors[0].shape.len(), gguf.tensors[0].bytes, gguf.tensors[0].elements()), (0, 4, 1));
}

#[test]
fn a_dimension_of_zero() {
    let raw = Raw::new(3, 1, 0).tensor("w", &[32, 0], 0, 0).data(64);
    assert_says(&raw.refused(), &["tensor \"w\"", "a dimension of 0"]);
}

/// ggml-org/llama.cpp#18674, huggingface/candle#3588.
#[test]
fn sizes_that_wrap() {
    for dims in [&[1 << 32, 1 << 32][..], &[1 << 31, 1 << 31], &[1 << 62], &[1 << 62, 4]] {
        let raw = Raw::new(3, 1, 0).tensor("w", dims, 0, 0).data(64);
        assert_says(&raw.refused(), &["tensor \"w\"", "does not fit in 63 bits"]);
    }
}

/// huggingface/candle#3876, ggml-org/llama.cpp#24997 and #26318, antirez/gguf-tools#27.
#[test]
fn alignments_that_are_none() {
    let key = |kind: u32| Raw::new(3, 0, 1).string("general.alignment").u32(kind);
    for value in [0, 3, 1 << 31] {
        assert_says(&key(4).u32(value).refused(), &["general.alignment", &value.to_string(), "power of two"]);
    }
    assert_says(&key(5).u32(32).refused(), &["general.alignment", "i32 32", "wanted u32"]);
    assert_says(&key(8).string("32").refused(), &["general.alignment", "a string", "wanted u32"]);
    assert_says(&key(10).u64(32).refused(), &["general.alignment", "u64 32", "wanted u32"]);
    assert_eq!(key(4).u32(64).parse().unwrap().alignment, 64);
}

/// ggml-org/llama.cpp#19003 and #27188, huggingface/candle#3533, leejet/stable-diffusion.cpp#1397.
/// That these do not allocate either is tested in tests/hostile.rs.
#[test]
fn lengths_beyond_the_file() {
    let value = |kind: u32| Raw::new(3, 0, 1).string("k").u32(kind);
    let remain = "remain in the file";
    assert_says(&Raw::new(3, 0, 1).u64(1 << 48).data(8).refused(), &["name of metadata key 0", remain]);
    assert_says(&value(8).u64(1 << 63).data(8).refused(), &["\"k\"", "string", remain]);
    assert_says(&value(9).u32(8).u64(1 << 63).data(8).refused(), &["\"k\"", "array elements", remain]);
    assert_says(&value(9).u32(4).u64(1 << 62).data(8).refused(), &["\"k\"", "array elements", remain]);
    assert_says(&Raw::new(3, 1 << 63, 0).data(8).refused(), &["9223372036854775808 tensors", remain]);
    assert_says(&Raw::new(3, 0, 1 << 63).data(8).refused(), &["9223372036854775808 metadata keys", remain]);
    assert_says(&Raw(Raw::new(3, 0, 0).0[..20].to_vec()).refused(), &["key count", remain]);
}

/// Luce-Org/lucebox#438 and the overflow in its fix, #458.
#[test]
fn tensors_outside_the_file() {
    let whole = Raw::new(3, 1, 0).tensor("w", &[32], 0, 0).data(128);
    whole.clone().parse().unwrap();
    for cut in [1, 64, 128] {
        let mut raw = whole.clone();
        raw.0.truncate(raw.0.len() - cut);
        assert_says(&raw.refused(), &["tensor \"w\"", "needs 128 bytes", remaining_is(128 - cut).as_str()]);
    }
    let raw = Raw::new(3, 1, 0).tensor("w", &[32], 0, u64::MAX - 31).data(128);
    assert_says(&raw.refused(), &["tensor \"w\"", "overflows"]);
    let raw = Raw::new(3, 1, 0).tensor("w", &[32], 0, 16).data(256);
    assert_says(&raw.refused(), &["tensor \"w\"", "16 is not a multiple of the alignment 32"]);
}

fn remaining_is(bytes: usize) -> String {
    format!("but {bytes} remain")
}

#[test]
fn tensors_that_overlap() {
    let two = |offset| Raw::new(3, 2, 0).tensor("b", &[32], 0, offset).tensor("a", &[32], 0, 0).data(512);
    assert_eq!(two(128).parse().unwrap().tensors[0].name, "b");
    two(256).parse().unwrap();
    assert_says(&two(96).refused(), &["tensor \"b\"", "inside tensor \"a\""]);
    assert_says(&two(0).refused(), &["it begins at byte", "inside tensor"]);
}

/// ggml-org/llama.cpp#6836.
#[test]
fn names_that_are_there_twice() {
    let raw = Raw::new(3, 2, 0).tensor("w", &[1], 0, 0).tensor("w", &[1], 0, 32).data(64);
    assert_says(&raw.refused(), &["tensor \"w\"", "twice"]);
    let raw = Raw::new(3, 0, 2).string("k").u32(0).bytes(&[1]).string("k").u32(0).bytes(&[2]);
    assert_says(&raw.refused(), &["key \"k\"", "twice"]);
}

/// ggml-org/llama.cpp#13943 and #3901, ollama/ollama#4938 and #4987.
#[test]
fn versions_and_byte_order() {
    let with = |version: u32| Raw::new(version, 1, 0).tensor("w", &[8], 0, 0).data(32);
    for version in [2, 3] {
        assert_eq!(with(version).parse().unwrap().version, version);
    }
    for version in [0, 1, 4, 100] {
        assert_says(&with(version).refused(), &[&format!("GGUF version {version} is not supported")]);
    }
    assert_says(&with(3u32.swap_bytes()).refused(), &["big-endian"]);
    assert_says(&Raw(b"GGML1234".to_vec()).refused(), &["not a GGUF", "GGML"]);
    assert_says(&Raw(b"FUGG".to_vec()).refused(), &["not a GGUF", "FUGG"]);
    assert_says(&Raw(Vec::new()).refused(), &["the magic", "but 0 remain"]);
}

/// WestWaters/pollard-weights#103, ggml-org/llama.cpp#14996: 896 x 256 divides by 256, its rows do not.
#[test]
fn a_row_that_blocks_do_not_tile() {
    let raw = Raw::new(3, 1, 0).tensor("blk.1.ffn", &[896, 256], 12, 0).data(896);
    assert_says(&raw.refused(), &["tensor \"blk.1.ffn\"", "rows of 896", "q4_k", "256"]);
    let raw = Raw::new(3, 2, 0).tensor("a", &[256], 12, 0).tensor("b", &[896], 8, 160).data(160 + 28 * 34);
    assert_eq!(raw.parse().unwrap().tensors[1].bytes, 28 * 34);
}

#[test]
fn element_types_that_are_not_read_are_named() {
    let with = |kind| Raw::new(3, 1, 0).tensor("w", &[256], kind, 0).data(512).refused();
    assert_says(&with(4), &["tensor \"w\"", "4 (q4_2, removed", "q6_k"]);
    assert_says(&with(9999), &["tensor \"w\"", "9999 (unknown)"]);
}

#[test]
fn damaged_values() {
    let value = |kind: u32| Raw::new(3, 0, 1).string("k").u32(kind);
    assert_says(&value(13).u64(0).refused(), &["\"k\"", "value type 13", "unknown"]);
    assert_says(&value(9).u32(77).u64(0).refused(), &["\"k\"", "array element type 77"]);
    assert_says(&value(7).bytes(&[2]).refused(), &["\"k\"", "bool 2"]);
    assert_says(&value(9).u32(7).u64(3).bytes(&[0, 1, 9]).refused(), &["\"k\"", "bool 9"]);
    let deep = (0..40).fold(value(9), |raw, _| raw.u32(9).u64(1));
    assert_says(&deep.u32(0).u64(0).refused(), &["\"k\"", "nested more than 4"]);
    assert_says(&Raw::new(3, 0, 1).u64(2).bytes(&[0xff, 0xfe]).u32(0).bytes(&[0]).refused(), &["not UTF-8"]);
}

/// Text is checked where it is read: one bad description must not cost the model.
#[test]
fn text_that_is_not_utf8() {
    let raw = Raw::new(3, 0, 2).string("s").u32(8).u64(1).bytes(&[0xff]);
    let raw = raw.string("a").u32(9).u32(8).u64(2).string("ok").u64(2).bytes(&[0xc3, 0x28]);
    let keys = raw.parse().unwrap().metadata;
    assert_says(&keys.str("s").unwrap_err().to_string(), &["\"s\"", "not UTF-8"]);
    assert_says(&keys.strings("a").unwrap_err().to_string(), &["\"a\"", "string 1", "not UTF-8"]);
    assert_eq!(keys.byte_strings_opt("a").unwrap().unwrap(), [&b"ok"[..], &[0xc3, 0x28]]);
    assert_eq!(keys.get("s").unwrap().to_string(), "\"\u{fffd}\"");
}

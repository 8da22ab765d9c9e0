//! Files taken apart and written again, and everything a writer must refuse.

use std::fs;

use tempfile::TempDir;

use super::super::Gguf;
use super::*;
use crate::Bytes;

#[track_caller]
fn says(error: Error, words: &[&str]) {
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

/// The outline of a parsed file: what a program that changes only some tensors starts from.
fn outline_of(gguf: &Gguf) -> Outline {
    let mut outline = Outline::new();
    outline.copy(&gguf.metadata, &[]).unwrap();
    for tensor in &gguf.tensors {
        outline.tensor(&tensor.name, tensor.dtype, &tensor.shape).unwrap();
    }
    outline
}

/// The same file again, its tensors streamed in pieces of an odd size.
fn written_again(bytes: &Bytes) -> Vec<u8> {
    let gguf = Gguf::parse(bytes).unwrap();
    let outline = outline_of(&gguf);
    let mut stream = outline.begin(Vec::new()).unwrap();
    for tensor in &gguf.tensors {
        let data = &bytes[tensor.offset as usize..][..tensor.bytes as usize];
        for piece in data.chunks(4097) {
            stream.write(&tensor.name, piece).unwrap();
        }
    }
    let written = stream.finish().unwrap();
    assert_eq!(outline.file_bytes().unwrap(), written.len() as u64);
    written
}

/// Other programs' files, taken apart and written again: the same bytes, of every fixture there is.
#[test]
fn every_fixture_is_written_as_it_was_read() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gguf");
    let mut files = 0;
    for folder in fs::read_dir(root).unwrap() {
        for entry in fs::read_dir(folder.unwrap().path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "gguf") {
                let bytes = Bytes::map(&path).unwrap();
                assert!(written_again(&bytes) == bytes[..], "{}", path.display());
                files += 1;
            }
        }
    }
    assert!(files >= 10, "only {files} fixtures were found");
}

/// Every type of value, arrays in arrays and empty ones, keys in an order of their own, text that is not UTF-8, tensors
/// of no and of four dimensions, and an alignment of which every tensor begins at a multiple.
#[test]
fn every_value_and_shape_is_written_as_it_was_read() {
    for alignment in [1u32, 8, 32, 4096] {
        let mut writer = Writer::new();
        writer.set("z", &1u8).unwrap();
        writer.set("i8", &-1i8).unwrap();
        writer.set("u16", &2u16).unwrap();
        writer.set("i16", &-2i16).unwrap();
        writer.set("i32", &-3i32).unwrap();
        writer.set("u64", &u64::MAX).unwrap();
        writer.set("i64", &i64::MIN).unwrap();
        writer.set("f32", &f32::NAN).unwrap();
        writer.set("f64", &-0.0f64).unwrap();
        writer.set("bool", &true).unwrap();
        writer.set("general.alignment", &alignment).unwrap();
        writer.set("text", "é\0").unwrap();
        writer.set("texts", &["a", "", "c"]).unwrap();
        writer.set("bools", &[true, false]).unwrap();
        writer.set("doubles", &[0.1f64]).unwrap();
        writer.set("none", &Vec::<String>::new()).unwrap();
        writer.set("no floats", &Vec::<f32>::new()).unwrap();
        writer.set("nested", &[vec![1u64, 2], vec![]]).unwrap();
        writer.set("deep", &[vec![vec!["a", "b"], vec![]], vec![]]).unwrap();
        writer.set("a", &4u32).unwrap();
        writer.tensor("z", DType::F16, &[3], vec![1; 6]).unwrap();
        writer.tensor("scalar", DType::F32, &[], vec![2; 4]).unwrap();
        writer.tensor("four", DType::I8, &[2, 1, 3, 5], vec![3; 30]).unwrap();
        writer.tensor("blocks", DType::Q4K, &[3, 512], vec![4; 864]).unwrap();
        let bytes = Bytes::from(writer.to_bytes());
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!((gguf.alignment, gguf.metadata.len()), (u64::from(alignment), 20));
        assert!(
            gguf.tensors.iter().all(|t| (t.offset - gguf.data_start).is_multiple_of(u64::from(alignment)))
        );
        assert!(written_again(&bytes) == bytes[..], "alignment {alignment}");
    }
    let text = [&b"GGUF\x03\0\0\0"[..], &[0; 8], &[1, 0, 0, 0, 0, 0, 0, 0], &[1, 0, 0, 0, 0, 0, 0, 0], b"k"];
    let text = [&text.concat()[..], &[8, 0, 0, 0], &[2, 0, 0, 0, 0, 0, 0, 0], &[0xff, 0xfe]].concat();
    assert!(written_again(&Bytes::from(text.clone())) == text);
}

#[test]
fn what_a_reader_refuses_is_not_written() {
    let mut outline = Outline::new();
    outline.set("k", &1u32).unwrap();
    says(outline.set("k", &2u32).unwrap_err(), &["\"k\"", "already"]);
    says(outline.set("general.alignment", &48u32).unwrap_err(), &["general.alignment", "48"]);
    says(outline.set("general.alignment", &32u64).unwrap_err(), &["general.alignment", "wanted u32"]);
    outline.tensor("t", DType::F32, &[2]).unwrap();
    says(outline.tensor("t", DType::F32, &[2]).unwrap_err(), &["\"t\"", "already"]);
    says(outline.tensor("v", DType::Q8_0, &[2]).unwrap_err(), &["\"v\"", "rows of 2"]);
    says(outline.tensor("w", DType::F32, &[2, 0]).unwrap_err(), &["\"w\"", "a dimension of 0"]);
    says(outline.tensor("x", DType::F32, &[1; 5]).unwrap_err(), &["\"x\"", "5 dimensions"]);
    says(outline.tensor("y", DType::F32, &[1 << 62]).unwrap_err(), &["\"y\"", "63 bits"]);
    let mut writer = Writer::new();
    says(writer.tensor("u", DType::F32, &[2], vec![0; 9]).unwrap_err(), &["\"u\"", "takes 8 bytes, not 9"]);
    // Refused tensors leave no trace.
    let mut stream = outline.begin(Vec::new()).unwrap();
    stream.write("t", &[0; 8]).unwrap();
    let gguf = Gguf::parse(&Bytes::from(stream.finish().unwrap())).unwrap();
    assert_eq!((gguf.metadata.len(), gguf.tensors.len()), (1, 1));

    let mut huge = Outline::new();
    for name in ["a", "b", "c"] {
        huge.tensor(name, DType::I8, &[i64::MAX as usize]).unwrap();
    }
    says(huge.file_bytes().unwrap_err(), &["64 bits"]);
    says(huge.begin(Vec::new()).unwrap_err(), &["64 bits"]);
}

fn two_tensors() -> Outline {
    let mut outline = Outline::new();
    outline.tensor("a", DType::F32, &[2]).unwrap();
    outline.tensor("b", DType::F32, &[2]).unwrap();
    outline
}

#[test]
fn more_or_less_than_declared_is_refused() {
    let outline = two_tensors();
    let mut stream = outline.begin(Vec::new()).unwrap();
    says(stream.write("b", &[0; 8]).unwrap_err(), &["\"b\"", "not its turn", "\"a\" has 0 of its 8"]);
    stream.write("a", &[1; 3]).unwrap();
    says(stream.write("a", &[0; 6]).unwrap_err(), &["\"a\"", "takes 8 bytes, but 9"]);
    says(stream.write("b", &[0; 8]).unwrap_err(), &["\"b\"", "\"a\" has 3 of its 8"]);
    stream.write("a", &[1; 5]).unwrap();
    says(stream.write("a", &[0; 1]).unwrap_err(), &["\"a\"", "not its turn"]);
    stream.write("b", &[2; 8]).unwrap();
    says(stream.write("c", &[0; 8]).unwrap_err(), &["\"c\"", "written already"]);
    // Nothing of what was refused is in the file.
    let bytes = Bytes::from(stream.finish().unwrap());
    let gguf = Gguf::parse(&bytes).unwrap();
    let data = gguf.tensors.iter().map(|t| &bytes[t.offset as usize..][..8]);
    assert_eq!(data.collect::<Vec<_>>(), [[1; 8], [2; 8]]);

    let mut stream = outline.begin(Vec::new()).unwrap();
    stream.write("a", &[1; 5]).unwrap();
    says(stream.finish().unwrap_err(), &["\"a\"", "5 of its 8 bytes", "1 tensors follow"]);
}

#[test]
fn a_file_has_its_name_only_when_it_is_whole() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let names = || fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    fs::write(&path, "old").unwrap();
    let outline = two_tensors();

    // Dropped, ended too early, or refused: the old file stays, and nothing else.
    let mut file = outline.create(&path).unwrap();
    file.write("a", &[1; 8]).unwrap();
    assert_eq!(names().len(), 2);
    drop(file);
    let mut file = outline.create(&path).unwrap();
    file.write("a", &[1; 8]).unwrap();
    says(file.finish().unwrap_err(), &["m.gguf", "\"b\"", "0 of its 8 bytes"]);
    assert_eq!((fs::read(&path).unwrap(), names()), (b"old".to_vec(), vec!["m.gguf".into()]));

    let mut file = outline.create(&path).unwrap();
    file.write("a", &[1; 8]).unwrap();
    file.write("b", &[2; 8]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    file.finish().unwrap();
    assert_eq!(names(), ["m.gguf"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), outline.file_bytes().unwrap());

    // What killed processes left goes at the next start; what is being written, and other files, stay.
    for name in ["m.gguf.4000000.tmp", "m.gguf.x.tmp", "n.gguf.9.tmp", "m.gguf.77.tmp"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let busy = fs::File::open(dir.path().join("m.gguf.77.tmp")).unwrap();
    busy.lock().unwrap();
    drop(outline.create(&path).unwrap());
    let stays = |name: &str| dir.path().join(name).exists();
    assert!(!stays("m.gguf.4000000.tmp") && stays("m.gguf.77.tmp"));
    assert!(stays("m.gguf.x.tmp") && stays("n.gguf.9.tmp"));
    says(outline.create(dir.path()).unwrap_err(), &["cannot create", "not a regular file"]);
    says(outline.create(&dir.path().join("no/m.gguf")).unwrap_err(), &["cannot create", "no/m.gguf"]);
}

/// A disk that is full after some bytes.
#[derive(Debug)]
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let room = self.0.min(bytes.len());
        self.0 -= room;
        if room == 0 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(room) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn nothing_follows_a_failed_write() {
    let outline = two_tensors();
    says(outline.begin(Full(10)).unwrap_err(), &["cannot write"]);
    let header = outline.encode().unwrap().0.len();
    let mut stream = outline.begin(Full(header + 5)).unwrap();
    says(stream.write("a", &[0; 8]).unwrap_err(), &["cannot write"]);
    says(stream.write("a", &[0; 8]).unwrap_err(), &["\"a\"", "an earlier write failed"]);
    says(stream.finish().unwrap_err(), &["\"a\"", "0 of its 8 bytes"]);
}

#[test]
fn a_new_file_leaves_one_that_came_meanwhile() {
    let dir = TempDir::new().unwrap();
    let (path, temporary) = (dir.path().join("m.gguf"), dir.path().join("t"));
    let outline = two_tensors();
    let written = || {
        let mut file = outline.create(&path).unwrap();
        file.write("a", &[1; 8]).unwrap();
        file.write("b", &[2; 8]).unwrap();
        file
    };
    let count = || fs::read_dir(dir.path()).unwrap().count();
    written().finish_new().unwrap();
    assert_eq!((fs::metadata(&path).unwrap().len(), count()), (outline.file_bytes().unwrap(), 1));
    let file = written();
    fs::write(&path, "theirs").unwrap();
    says(file.finish_new().unwrap_err(), &["m.gguf came to be there while it was written, and stays"]);
    assert_eq!((fs::read(&path).unwrap(), count()), (b"theirs".to_vec(), 1));

    // With links between files and without.
    for publish in [stream::publish_new, stream::take_name] {
        fs::write(&path, "theirs").unwrap();
        fs::write(&temporary, "ours").unwrap();
        assert_eq!(publish(&temporary, &path).unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
        fs::remove_file(&path).unwrap();
        publish(&temporary, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"ours");
        // A link is the same file under two names.
        fs::remove_file(&path).unwrap();
    }
}

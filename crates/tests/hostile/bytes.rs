//! Every cut and every changed header byte of small valid files: an answer or a refusal, in time and in memory.

use std::path::Path;

use ingle_tensor::{Bytes, Checkpoint, gguf::Gguf};
use ingle_tests::attack::driver::{Input, Target, judge};
use ingle_tests::attack::seeds;
use ingle_tests::attack::watch::measure_here;
use tempfile::TempDir;

/// What opening a file may ask for at once beyond the file's size, in bytes: an error's words, a path, the first entries
/// of a table.
const SLACK: usize = 4 << 10;

/// Opens the file, alone changed in its folder, under the count: nothing it claims gets more memory than it has bytes.
fn opens_within(folder: &Input, name: &str, data: &[u8], path: &Path, what: &str) {
    std::fs::write(path, data).unwrap();
    let size =
        data.len() + folder.iter().filter(|(other, _)| other != name).map(|(_, d)| d.len()).sum::<usize>();
    let root = if folder.len() > 1 { path.parent().unwrap() } else { path };
    let ((), usage) = measure_here(|| drop(Checkpoint::open(root)));
    assert!(usage.largest <= size + SLACK, "{name}, {what}: {} bytes at once for {size}", usage.largest);
    assert!(usage.peak <= 2 * size + SLACK, "{name}, {what}: {} bytes held for {size}", usage.peak);
}

/// Walks the file `name`, alone changed, and says whether it was answered.
fn answered(target: Target, name: &str, data: Vec<u8>, what: &str) -> bool {
    let input: Input = vec![(name.into(), data)];
    judge(target, &input).unwrap_or_else(|fault| panic!("{name}, {what}: {fault}")).is_ok()
}

/// Cuts the file at every byte up to `upto`.
fn cut_anywhere(target: Target, name: &str, data: &[u8], upto: usize) -> usize {
    (0..upto).filter(|&len| answered(target, name, data[..len].to_vec(), &format!("cut to {len}"))).count()
}

/// Changes every byte up to `upto` to 0, to 255, to the next number, and in its highest bit. Returns how many of the
/// changed files were answered and how many refused.
fn change_anywhere(target: Target, name: &str, data: &[u8], upto: usize) -> (usize, usize) {
    let mut counts = (0, 0);
    for at in 0..upto {
        let old = data[at];
        for new in [0, 0xff, old.wrapping_add(1), old ^ 0x80] {
            if new == old {
                continue;
            }
            let mut changed = data.to_vec();
            changed[at] = new;
            match answered(target, name, changed, &format!("byte {at} = {new}")) {
                true => counts.0 += 1,
                false => counts.1 += 1,
            }
        }
    }
    counts
}

/// A file of the seeds' folder.
fn of_folder(name: &str) -> Vec<u8> {
    let files = [seeds::folder(true), seeds::folder(false)].concat();
    files.into_iter().find(|(found, _)| found == name).expect("a file of the folder").1
}

#[test]
fn opening_asks_for_no_more_than_the_file() {
    let one = |data| vec![("m.gguf".into(), data)];
    for folder in [one(seeds::gguf(false)), one(seeds::gguf(true)), seeds::folder(true)] {
        let dir = TempDir::new().unwrap();
        for (name, data) in &folder {
            std::fs::write(dir.path().join(name), data).unwrap();
        }
        for (name, data) in &folder {
            let path = dir.path().join(name);
            for at in 0..data.len().min(if folder.len() > 1 { 1500 } else { 4000 }) {
                if at % 3 == 0 {
                    opens_within(&folder, name, &data[..at], &path, &format!("cut to {at}"));
                }
                let mut changed = data.clone();
                changed[at] = [0xff, 0, data[at] ^ 0x80, data[at].wrapping_add(1)][at % 4];
                opens_within(&folder, name, &changed, &path, &format!("byte {at} = {}", changed[at]));
            }
            std::fs::write(&path, data).unwrap();
        }
    }
    // The control: a file that is larger in memory than on disk is seen.
    let (ghost, usage) = measure_here(|| Vec::<u8>::with_capacity(1 << 20));
    assert!(usage.largest >= ghost.capacity());
}

#[test]
fn gguf_cut_anywhere() {
    for byte_level in [false, true] {
        let data = seeds::gguf(byte_level);
        // Padding after the last tensor may go.
        let gguf = Gguf::parse(&Bytes::from(data.clone())).unwrap();
        let end = gguf.tensors.iter().map(|t| t.offset + t.bytes).max().unwrap() as usize;
        assert_eq!(cut_anywhere(Target::Gguf, "m.gguf", &data, data.len()), data.len() - end);
    }
}

#[test]
fn gguf_with_any_header_byte_changed() {
    let data = seeds::gguf(false);
    let start = Gguf::parse(&Bytes::from(data.clone())).unwrap().data_start as usize;
    let (answered, refused) = change_anywhere(Target::Gguf, "m.gguf", &data, start);
    assert!(answered > 1000 && refused > 2000, "{answered} {refused}");
}

#[test]
fn safetensors_cut_and_changed_anywhere() {
    let (name, data) = &seeds::folder(false)[0];
    let header = 8 + u64::from_le_bytes(*data.first_chunk().unwrap()) as usize;
    assert_eq!(cut_anywhere(Target::SafeTensors, name, data, header + 64), 0);
    assert!(
        (header + 64..data.len()).step_by(61).all(|len| {
            !answered(Target::SafeTensors, name, data[..len].to_vec(), &format!("cut to {len}"))
        })
    );
    let (answered, refused) = change_anywhere(Target::SafeTensors, name, data, header);
    assert!(answered > 0 && refused > 2000, "{answered} {refused}");
}

#[test]
fn config_cut_and_changed_anywhere() {
    let data = of_folder("config.json");
    assert_eq!(cut_anywhere(Target::SafeTensors, "config.json", &data, data.len()), 0);
    let (answered, refused) = change_anywhere(Target::SafeTensors, "config.json", &data, data.len());
    assert!(answered > 100 && refused > 500, "{answered} {refused}");
}

#[test]
fn index_cut_and_changed_anywhere() {
    let name = "model.safetensors.index.json";
    let data = of_folder(name);
    assert_eq!(cut_anywhere(Target::SafeTensors, name, &data, data.len()), 0);
    let (answered, refused) = change_anywhere(Target::SafeTensors, name, &data, data.len());
    assert!(answered > 10 && refused > 1000, "{answered} {refused}");
}

#[test]
fn tokenizer_cut_and_changed_anywhere() {
    let data = of_folder("tokenizer.json");
    assert_eq!(cut_anywhere(Target::Tokenizer, "tokenizer.json", &data, data.len()), 0);
    let (answered, refused) = change_anywhere(Target::Tokenizer, "tokenizer.json", &data, data.len());
    assert!(answered > 200 && refused > 2000, "{answered} {refused}");
}

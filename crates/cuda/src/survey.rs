//! What of CUDA this machine has, and whether it can be used.

use std::path::PathBuf;

use crate::compile::{Compiler, Search};
use crate::driver::{Device, Driver};
use crate::kernels;
use crate::{Error, Result};

/// The driver, as found.
#[derive(Debug)]
pub struct DriverFound {
    /// Name under which the loader found its library.
    pub library: PathBuf,
    /// Newest CUDA version it supports.
    pub version: (u32, u32),
    /// Its devices, each with what keeps it from being used.
    pub devices: Result<Vec<(Device, Result<()>)>>,
}

/// NVRTC, as found.
#[derive(Debug)]
pub struct CompilerFound {
    /// Path or name.
    pub library: PathBuf,
    /// Its version.
    pub version: (u32, u32),
    /// For each architecture (the devices', or without one the oldest), whether the smallest kernel compiles.
    pub archs: Vec<(String, Result<()>)>,
}

/// Everything CUDA needs of a machine.
#[derive(Debug)]
pub struct Survey {
    /// The driver, or why there is none.
    pub driver: Result<DriverFound>,
    /// NVRTC, or why there is none.
    pub compiler: Result<CompilerFound>,
}

/// Looks at everything; compiles the smallest kernel, and writes nothing.
pub fn survey(search: &Search) -> Survey {
    let driver = Driver::get().map(|driver| DriverFound {
        library: driver.library().into(),
        version: driver.version(),
        devices: driver
            .devices()
            .map(|devices| devices.into_iter().map(|device| (device.clone(), device.check())).collect()),
    });
    let devices = driver.as_ref().ok().and_then(|driver| driver.devices.as_ref().ok());
    let mut archs: Vec<String> = devices.into_iter().flatten().map(|(device, _)| device.arch()).collect();
    archs.dedup();
    if archs.is_empty() {
        archs.push(kernels::ARCHS[0].into());
    }
    let compiler = search.open().map(|nvrtc| {
        let compiler = Compiler::new(nvrtc, None);
        let compiles = |arch: &String| compiler.cubin(kernels::smallest(), arch).map(|_| ());
        CompilerFound {
            library: compiler.nvrtc().library().into(),
            version: compiler.nvrtc().version(),
            archs: archs.iter().map(|arch| (arch.clone(), compiles(arch))).collect(),
        }
    });
    Survey { driver, compiler }
}

impl Survey {
    /// The first device that can be used.
    pub fn usable(&self) -> Option<usize> {
        let devices = self.driver.as_ref().ok()?.devices.as_ref().ok()?;
        let at = devices.iter().position(|(_, check)| check.is_ok())?;
        self.obstacle().is_none().then_some(at)
    }

    /// The first reason why no device can be used, `None` when one can.
    pub fn obstacle(&self) -> Option<&Error> {
        let driver = match &self.driver {
            Err(error) => return Some(error),
            Ok(driver) => driver,
        };
        let devices = match &driver.devices {
            Err(error) => return Some(error),
            Ok(devices) => devices,
        };
        let usable = devices.iter().any(|(_, check)| check.is_ok());
        if let (false, Some((_, Err(error)))) = (usable, devices.first()) {
            return Some(error);
        }
        match &self.compiler {
            Err(error) => Some(error),
            Ok(compiler) if compiler.archs.iter().any(|(_, compiles)| compiles.is_ok()) => None,
            Ok(compiler) => compiler.archs.iter().find_map(|(_, compiles)| compiles.as_ref().err()),
        }
    }
}

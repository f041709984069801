//! What a result was measured on. What cannot be found out is `null`, never guessed.

use std::process::Command;

use serde::Serialize;

use crate::ggml::Backend;

/// The machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// The device that computed.
    pub device: DeviceFacts,
    /// The GPU as its driver's tool describes it.
    pub gpu: Option<GpuFacts>,
    /// Model of the CPU.
    pub cpu: Option<String>,
    /// Logical cores that this process may use.
    pub n_cores: usize,
    /// Host memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Release of the kernel.
    pub kernel: Option<String>,
}

/// The device as ggml and our library know it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceFacts {
    /// Name, such as `CPU` or `CUDA0`.
    pub name: String,
    /// Description.
    pub description: String,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Compute capability times 100.
    pub compute_cap: Option<u32>,
    /// CUDA version of the driver, 13000 for 13.0.
    pub cuda_driver: Option<u32>,
    /// CUDA version of the runtime.
    pub cuda_runtime: Option<u32>,
    /// Whether ggml-cuda records graphs.
    pub cuda_graphs: Option<bool>,
    /// Whether the Hopper attention configuration is active.
    pub hopper_fa512: Option<bool>,
}

/// What `nvidia-smi` says about the GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuFacts {
    /// Name.
    pub name: String,
    /// Version of the driver.
    pub driver: String,
    /// Power limit in watts.
    pub power_limit_w: Option<f64>,
    /// Highest clock of the multiprocessors, in MHz.
    pub max_sm_mhz: Option<f64>,
    /// Mode of error correction.
    pub ecc: Option<String>,
    /// Index that the tool was asked for.
    pub index: String,
}

/// Clocks and load of the GPU at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Clocks {
    /// Clock of the multiprocessors, in MHz.
    pub sm_mhz: Option<f64>,
    /// Clock of the memory, in MHz.
    pub memory_mhz: Option<f64>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Power in watts.
    pub power_w: Option<f64>,
}

impl DeviceFacts {
    /// Asks an open backend.
    pub fn of(backend: &Backend) -> Self {
        let (device, cuda) = (backend.device(), backend.cuda());
        Self {
            name: device.name(),
            description: device.description(),
            memory_bytes: device.memory().map(|(_, total)| total),
            compute_cap: cuda.map(|c| c.compute_cap),
            cuda_driver: cuda.map(|c| c.driver),
            cuda_runtime: cuda.map(|c| c.runtime),
            cuda_graphs: cuda.map(|c| c.cuda_graphs),
            hopper_fa512: cuda.map(|c| c.hopper_fa512),
        }
    }
}

impl Machine {
    /// This machine. `visible` is the value of `CUDA_VISIBLE_DEVICES`.
    pub fn new(device: DeviceFacts, visible: Option<&str>) -> Self {
        let index = gpu_index(&device.name, visible);
        Self {
            gpu: index.and_then(|index| gpu(&index)),
            cpu: read("/proc/cpuinfo").and_then(|text| field(&text, "model name")),
            n_cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: read("/proc/meminfo").and_then(|text| memory_bytes(&text)),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            device,
        }
    }

    /// Clocks of its GPU now.
    pub fn clocks(&self) -> Option<Clocks> {
        clocks(&self.gpu.as_ref()?.index)
    }

    /// One line for people.
    pub fn describe(&self) -> String {
        let unknown = || "unknown".to_owned();
        let cpu = self.cpu.clone().unwrap_or_else(unknown);
        let mut text = format!("{cpu}, {} cores", self.n_cores);
        if let Some(gpu) = &self.gpu {
            let limit = gpu.power_limit_w.map_or_else(unknown, |w| format!("{w} W"));
            text = format!(
                "{}, driver {}, power limit {limit}; {text}",
                gpu.name, gpu.driver
            );
        } else if self.device.name != "CPU" {
            text = format!("{}, driver unknown; {text}", self.device.description);
        }
        text
    }
}

/// How `nvidia-smi` is asked for the device: it does not know `CUDA_VISIBLE_DEVICES`.
fn gpu_index(device: &str, visible: Option<&str>) -> Option<String> {
    let index: usize = device.strip_prefix("CUDA")?.parse().ok()?;
    match visible.filter(|list| !list.trim().is_empty()) {
        Some(list) => list.split(',').nth(index).map(|id| id.trim().to_owned()),
        None => Some(index.to_string()),
    }
}

/// The cells of one line of `nvidia-smi`.
fn query(index: &str, fields: &str) -> Option<Vec<String>> {
    let output = Command::new("nvidia-smi")
        .arg(format!("--query-gpu={fields}"))
        .args(["--format=csv,noheader,nounits", "-i", index])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    cells(&String::from_utf8_lossy(&output.stdout))
}

fn cells(text: &str) -> Option<Vec<String>> {
    let line = text.lines().next()?;
    Some(line.split(',').map(|cell| cell.trim().to_owned()).collect())
}

fn number(cells: &[String], i: usize) -> Option<f64> {
    cells.get(i)?.parse().ok()
}

fn gpu(index: &str) -> Option<GpuFacts> {
    let fields = "name,driver_version,power.limit,clocks.max.sm,ecc.mode.current";
    let cells = query(index, fields)?;
    Some(GpuFacts {
        name: cells.first()?.clone(),
        driver: cells.get(1)?.clone(),
        power_limit_w: number(&cells, 2),
        max_sm_mhz: number(&cells, 3),
        ecc: cells.get(4).cloned(),
        index: index.to_owned(),
    })
}

/// Clocks of a GPU now, where `nvidia-smi` is there.
fn clocks(index: &str) -> Option<Clocks> {
    let cells = query(index, "clocks.sm,clocks.mem,temperature.gpu,power.draw")?;
    Some(Clocks {
        sm_mhz: number(&cells, 0),
        memory_mhz: number(&cells, 1),
        temperature_c: number(&cells, 2),
        power_w: number(&cells, 3),
    })
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Value of the first line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// `MemTotal`, which is in KiB.
fn memory_bytes(text: &str) -> Option<u64> {
    let value = field(text, "MemTotal")?;
    let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_rename_the_index() {
        assert_eq!(gpu_index("CUDA1", None), Some("1".to_owned()));
        assert_eq!(gpu_index("CUDA1", Some("")), Some("1".to_owned()));
        assert_eq!(gpu_index("CUDA1", Some("4, 7")), Some("7".to_owned()));
        assert_eq!(
            gpu_index("CUDA0", Some("GPU-ab")),
            Some("GPU-ab".to_owned())
        );
        assert_eq!(gpu_index("CPU", None), None);
    }

    #[test]
    fn unreadable_cells_are_unknown() {
        let cells = cells("1980, [N/A], 35, 120.5\n").unwrap();

        assert_eq!(number(&cells, 0), Some(1980.0));
        assert_eq!(number(&cells, 1), None);
        assert_eq!(number(&cells, 3), Some(120.5));
        assert_eq!(number(&cells, 4), None);
    }

    #[test]
    fn proc_files_are_read_by_name() {
        assert_eq!(
            field("a: 1\nmodel name\t: Some CPU @ 2 GHz\n", "model name"),
            Some("Some CPU @ 2 GHz".to_owned())
        );
        assert_eq!(memory_bytes("MemTotal:  2 kB\n"), Some(2048));
    }
}

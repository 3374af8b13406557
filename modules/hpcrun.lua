-- Lmod modulefile of hpcrun (https://lmod.readthedocs.io, "Lua modulefile functions").
--
-- Used where it is installed it finds its own virtual environment:
--   module use <venv>/lib/python3.11/site-packages/hpcrun/_data/modules
-- Copied into the site's module tree, e.g. as hpcrun/0.1.0.lua, it needs `prefix`.

local prefix = "" -- the virtual environment that holds hpcrun; "" where this file lies inside it
local site = "" -- name of the site file to use on this cluster; "" detects it

if prefix == "" then
    prefix = myFileName():match("^(.*)/lib/python[^/]*/site%-packages/hpcrun/_data/modules/")
        or (myFileName():match("^(.*)/modules/[^/]*$") or "") .. "/.venv"
end

if mode() == "load" and not isFile(pathJoin(prefix, "bin", "hpcrun")) then
    LmodError("no bin/hpcrun in ", prefix, "; set prefix at the top of ", myFileName())
end

help([[
hpcrun submits multi-node PyTorch training to Slurm and sees it finish.

    hpcrun --help
    hpcrun recipe check recipe.yaml
    hpcrun submit recipe.yaml
]])

whatis("Name: hpcrun")
whatis("Description: submit, survive and understand multi-node PyTorch training on Slurm")

conflict("hpcrun")
prepend_path("PATH", pathJoin(prefix, "bin"))
if site ~= "" then
    setenv("HPCRUN_SITE", site)
end
